//! Endpoints that prove themselves by certificates, over the whole of a connection's life.

use std::path::Path;

use crate::fabric::{Fabric, config};
use proto::Span;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use transport::{Certificates, Event, TlsFiles};

/// Writes an authority and a member of it. What the authority is called does not matter; its key does.
fn member(directory: &Path, authority: &str) -> Certificates {
    let path = |file: &str| directory.join(format!("{authority}-{file}"));
    let mut params = CertificateParams::new([]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    std::fs::write(path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["downbeat".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    std::fs::write(path("member.pem"), certificate.pem()).unwrap();
    std::fs::write(path("member.key"), key.serialize_pem()).unwrap();
    let name = "downbeat".into();
    let (certificate, key, authority) = (path("member.pem"), path("member.key"), path("ca.pem"));
    Certificates::of_files(&TlsFiles { certificate, key, authority, name }).unwrap()
}

#[test]
fn members_connect_and_strangers_are_refused_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|authority| Some(member(directory.path(), authority)));
    let member = |node| config(node).with_tls(ours.clone());
    let mut fabric = Fabric::with([member(0), member(1), config(2).with_tls(theirs.clone()), config(3)]);
    let (near, far) = fabric.connect(0, 1);
    fabric.nodes[1].endpoint.send(far, b"over a queue pair").unwrap();
    assert_eq!(fabric.event(0), Event::Message { connection: near, frame: b"over a queue pair".to_vec() });
    for _ in 0..10 {
        fabric.skip(Span::from_millis(450));
        (0..20).for_each(|_| fabric.step());
    }
    fabric.quiet(0);
    // Of another authority, and without certificates.
    for stranger in [2, 3] {
        let (now, to) = (fabric.now(), fabric.address(1));
        let connection = fabric.nodes[stranger].endpoint.connect(now, to, Vec::new());
        fabric.disconnected(stranger, connection);
    }
    fabric.until("both to be counted", |fabric| (fabric.nodes[1].endpoint.connections_refused() == 2).then_some(()));
    fabric.nodes[0].endpoint.disconnect(near);
    fabric.disconnected(0, near);
    assert!(fabric.disconnected(1, far).contains("disconnected"));
}
