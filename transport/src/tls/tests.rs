//! Two ends on loopback, with certificates made for the test.
#![allow(clippy::disallowed_methods)] // A test that hangs is ended by the real clock.

use std::{
    io::ErrorKind,
    net::TcpListener,
    time::{Duration, Instant},
};

use rcgen::{CertificateParams, Issuer, KeyPair};
use tempfile::TempDir;

use super::*;

const NAME: &str = "cluster.example";

/// An authority and where its members' files lie.
struct Authority {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(directory.path().join("ca.pem"), certificate.pem()).unwrap();
        Self { directory, issuer: Issuer::new(params, key) }
    }

    /// A member whose certificate carries this name.
    fn member(&self, name: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |extension: &str| self.directory.path().join(format!("{name}.{extension}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        TlsFiles {
            certificate: path("pem"),
            key: path("key"),
            authority: self.directory.path().join("ca.pem"),
            name: NAME.into(),
        }
    }
}

fn pair(client: Option<&Tls>, server: Option<&Tls>) -> (Wire, Wire) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    (Wire::client(client, near), Wire::server(server, far))
}

/// Sends a megabyte from each end to the other, a piece at a time, as a link does. What the server, then what the
/// client got, or why one of them gave up.
fn exchange(mut client: Wire, mut server: Wire) -> Result<(Vec<u8>, Vec<u8>), String> {
    let message: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    let (mut sent, mut got) = ([0, 0], [Vec::new(), Vec::new()]);
    let mut buffer = vec![0; 64 << 10];
    let hang = Instant::now() + Duration::from_secs(300);
    while got.iter().any(|got| got.len() < message.len()) {
        assert!(Instant::now() < hang, "it hangs");
        for (end, wire) in [&mut client, &mut server].into_iter().enumerate() {
            match wire.read(&mut buffer) {
                Ok(0) => return Err("ended".into()),
                Ok(bytes) => got[end].extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("{}: {error}", ["client", "server"][end])),
            }
            let rest = &message[sent[end]..];
            match wire.flush().and_then(|()| if rest.is_empty() { Ok(0) } else { wire.write(rest) }) {
                Ok(bytes) => sent[end] += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("{}: {error}", ["client", "server"][end])),
            }
        }
    }
    let [client_got, server_got] = got;
    assert!(client_got == message && server_got == message);
    Ok((server_got, client_got))
}

fn load(files: &TlsFiles) -> Tls {
    Tls::load(files).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn two_members_understand_each_other() {
    let authority = Authority::new();
    let (one, other) = (load(&authority.member(NAME)), load(&authority.member(NAME)));
    let (client, server) = pair(Some(&one), Some(&other));
    exchange(client, server).unwrap();
    let (client, server) = pair(None, None);
    exchange(client, server).unwrap();
}

#[test]
fn a_server_of_another_authority_is_refused() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (ours, theirs) = (load(&ours.member(NAME)), load(&theirs.member(NAME)));
    for (client, server) in [(&ours, &theirs), (&theirs, &ours)] {
        let (client, server) = pair(Some(client), Some(server));
        let refused = exchange(client, server).unwrap_err();
        assert!(refused.starts_with("client: TLS: invalid peer certificate"), "{refused}");
    }
}

#[test]
fn the_clusters_name_is_asked_for_on_both_sides() {
    let authority = Authority::new();
    let member = load(&authority.member(NAME));
    let stranger = load(&authority.member("other.example"));
    let (client, server) = pair(Some(&stranger), Some(&member));
    let refused = exchange(client, server).unwrap_err();
    assert!(refused.starts_with("server: ") && refused.contains("not valid for name"), "{refused}");
    let (client, server) = pair(Some(&member), Some(&stranger));
    let refused = exchange(client, server).unwrap_err();
    assert!(refused.starts_with("client: ") && refused.contains("not valid for name"), "{refused}");
}

#[test]
fn one_without_tls_is_told_what_to_look_at() {
    let member = load(&Authority::new().member(NAME));
    let (client, server) = pair(None, Some(&member));
    let refused = exchange(client, server).unwrap_err();
    assert_eq!(refused, "server: it does not speak TLS; do both ends have [tls] configured?");
    let (client, server) = pair(Some(&member), None);
    let refused = exchange(client, server).unwrap_err();
    assert_eq!(refused, "client: it does not speak TLS; do both ends have [tls] configured?");
}

/// A client that trusts the authority, but shows this certificate instead of a member's.
fn intruder(authority: &Authority, shown: Option<&TlsFiles>) -> Tls {
    let member = authority.member(NAME);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&member.authority).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots);
    let client = match shown {
        None => config.with_no_client_auth(),
        Some(files) => {
            let chain = vec![CertificateDer::from_pem_file(&files.certificate).unwrap()];
            config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(&files.key).unwrap()).unwrap()
        }
    };
    Tls { client: Arc::new(client), ..load(&member) }
}

#[test]
fn a_client_without_a_certificate_or_with_anothers_is_refused() {
    let (authority, elsewhere) = (Authority::new(), Authority::new());
    let member = load(&authority.member(NAME));
    let foreign = elsewhere.member(NAME);
    for (shown, because) in [(None, "no certificates"), (Some(&foreign), "invalid peer certificate")] {
        let (client, server) = pair(Some(&intruder(&authority, shown)), Some(&member));
        let refused = exchange(client, server).unwrap_err();
        assert!(refused.starts_with("server: ") && refused.contains(because), "{refused}");
    }
}

#[test]
fn a_file_that_is_wrong_is_named_with_its_key() {
    let authority = Authority::new();
    let good = authority.member(NAME);
    let refused = |files: &TlsFiles| Tls::load(files).err().expect("refused").to_string();
    let error = refused(&TlsFiles { certificate: "/nowhere/x.pem".into(), ..good.clone() });
    assert!(error.starts_with("tls.certificate: /nowhere/x.pem: ") && error.lines().count() == 1, "{error}");
    let error = refused(&TlsFiles { authority: good.key.clone(), ..good.clone() });
    assert!(error.starts_with("tls.authority: ") && error.ends_with("no certificate in it"), "{error}");
    assert!(refused(&TlsFiles { key: good.certificate.clone(), ..good.clone() }).starts_with("tls.key: "));
    assert!(refused(&TlsFiles { name: "no name".into(), ..good.clone() }).starts_with("tls.name: `no name`"));
    let elsewhere = Authority::new();
    let error = refused(&TlsFiles { key: elsewhere.member(NAME).key, ..good });
    assert!(error.starts_with("tls.certificate and tls.key: "), "{error}");
}

/// Of RSA keys servers warn.
#[test]
fn a_key_on_a_curve_is_told_from_others() {
    let authority = Authority::new();
    let TlsFiles { certificate, key, .. } = authority.member("downbeat");
    let files = ServerTlsFiles { certificate: certificate.clone(), key, authority: None };
    assert!(!files.has_rsa_key("clients.tls").unwrap());
    let error = ServerTlsFiles { key: certificate, ..files }.has_rsa_key("clients.tls").unwrap_err().to_string();
    assert!(error.starts_with("clients.tls.key: "), "{error}");
}
