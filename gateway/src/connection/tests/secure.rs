//! Tokens, rates, heads and certificates: whoever is refused is told why, and others do not notice.

use std::sync::Arc;

use rcgen::{CertificateParams, Issuer, KeyPair};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tempfile::TempDir;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::*;
use crate::config::Config;

pub(super) const TOKEN: &str = "open sesame, please";

/// A gate with one token, which covers this.
pub(super) fn gate(allow: &str) -> Gate {
    let digest = "7b467437ad0215a143a8d995fea9a9e55d93a0c2ff3367e4a7990aec3f6fbd6b";
    let token = format!("[[token]]\nname = 'x'\nsha256 = '{digest}'\nallow = {{ {allow} }}");
    Gate { grants: toml::from_str::<Clients>(&token).unwrap().grants().unwrap(), ..open_gate(limits()) }
}

pub(super) fn bearer(request: &[u8], token: &str) -> Vec<u8> {
    let text = std::str::from_utf8(request).unwrap();
    text.replacen("\r\n", &format!("\r\nAuthorization: Bearer {token}\r\n"), 1).into_bytes()
}

/// What `/metrics` says about refusals for this cause.
pub(super) fn refused(peer: &Peer, cause: &str) -> u64 {
    let text = peer.server.service.record.read_metrics(&peer.desk).text();
    let line = format!("downbeat_refused_total{{cause=\"{cause}\"}} ");
    text.lines().find_map(|found| found.strip_prefix(&line)).expect("a counter of the cause").parse().unwrap()
}

#[test]
fn a_token_opens_what_it_covers_and_nothing_else() {
    with_gate(gate("operations = ['infer', 'metadata'], models = ['double']"), async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let good = post_of(INFER, "", GOOD.as_bytes());
        for (request, status, challenge, expected) in [
            (get_of("/v2/health/live"), 200, None, ""),
            (good.clone(), 401, Some("bearer"), "authorization: found no token, expected 'Bearer' and a token"),
            (bearer(&good, "wrong"), 401, Some("bearer"), "authorization: found an unknown token"),
            (bearer(&bearer(&good, TOKEN), TOKEN), 401, Some("bearer"), "authorization: found an unknown token"),
            (bearer(&good, TOKEN), 200, None, ""),
            (bearer(&get_of("/v2/models/double"), TOKEN), 200, None, ""),
            (
                bearer(&get_of("/v2/models/triple"), TOKEN),
                403,
                Some("bearer error=\"insufficient_scope\""),
                "token 'x' does not cover metadata of model 'triple'",
            ),
            (
                bearer(&get_of("/v2/models/stats"), TOKEN),
                403,
                Some("bearer error=\"insufficient_scope\""),
                "does not cover metadata of all models",
            ),
            (
                bearer(&get_of("/metrics"), TOKEN),
                403,
                Some("bearer error=\"insufficient_scope\""),
                "does not cover metrics",
            ),
        ] {
            let heard = ask(&mut stream, &request).await;
            assert_eq!((heard.status, heard.header("www-authenticate")), (status, challenge), "{heard:?}");
            if status != 200 {
                assert!(heard.json()["error"].as_str().unwrap().contains(expected), "{heard:?}");
            }
        }
        assert_eq!((refused(&peer, "unauthenticated"), refused(&peer, "forbidden")), (3, 3));
    });
}

#[test]
fn who_sends_too_often_or_too_much_waits() {
    with_gate(
        gate("operations = ['infer'], requests_per_second = 0.4, burst = 3, requests_max = 1"),
        async |address, peer| {
            let good = bearer(&post_of(INFER, "", GOOD.as_bytes()), TOKEN);
            let mut stream = TcpStream::connect(address).await.unwrap();
            assert_eq!(ask(&mut stream, &good).await.status, 200);

            peer.fates.borrow_mut().push_back(Fate::Keep);
            let mut kept = TcpStream::connect(address).await.unwrap();
            kept.write_all(&good).await.unwrap();
            while peer.kept.borrow().is_empty() {
                tokio::task::yield_now().await;
            }
            let busy = ask(&mut stream, &good).await;
            assert_eq!((busy.status, busy.header("retry-after")), (429, Some("1")), "{busy:?}");
            assert!(busy.json()["error"].as_str().unwrap().contains("1 requests under way already (requests_max)"));
            kept.set_zero_linger().unwrap();
            drop(kept);
            while peer.cancelled.get() == 0 {
                tokio::task::yield_now().await;
            }
            // Its task is cancelled a moment before it is not counted any more.
            let mut heard = ask(&mut stream, &good).await;
            while heard.status == 429 && heard.header("retry-after") == Some("1") {
                heard = ask(&mut stream, &good).await;
            }
            assert_eq!(heard.status, 200);

            let often = ask(&mut stream, &good).await;
            assert_eq!((often.status, often.header("retry-after")), (429, Some("3")), "{often:?}");
            assert!(often.json()["error"].as_str().unwrap().contains("exceeds its rate"));
            assert!(refused(&peer, "requests") >= 1 && refused(&peer, "rate") == 1);
            assert_eq!(ask(&mut stream, &get_of("/v2/health/live")).await.status, 200, "others are not concerned");
        },
    );
}

#[test]
fn all_requests_together_are_bounded() {
    with_server(Limits { requests_max: 1, ..limits() }, async |address, peer| {
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let mut kept = TcpStream::connect(address).await.unwrap();
        kept.write_all(&post_of(INFER, "", GOOD.as_bytes())).await.unwrap();
        while peer.kept.borrow().is_empty() {
            tokio::task::yield_now().await;
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, &get_of("/v2")).await;
        assert_eq!((heard.status, heard.header("retry-after")), (503, Some("1")), "{heard:?}");
        kept.set_zero_linger().unwrap();
        drop(kept);
        while ask(&mut stream, &get_of("/v2")).await.status != 200 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn large_heads_are_refused_and_their_connection_ends() {
    with_server(limits(), async |address, peer| {
        let large = format!("GET /v2 HTTP/1.1\r\nhost: h\r\nx: {}\r\n\r\n", "y".repeat(8200));
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = ask(&mut stream, large.as_bytes()).await;
        assert_eq!((heard.status, heard.header("connection")), (431, Some("close")), "{heard:?}");
        assert!(heard.json()["error"].as_str().unwrap().contains("expected at most 8192 (head_bytes_max)"));
        assert!(hear(&mut stream).await.is_none());
        assert_eq!(refused(&peer, "head"), 1);
        is_served(&mut TcpStream::connect(address).await.unwrap()).await;
    });
}

/// An authority, and where the files of those lie whom it knows.
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
        std::fs::write(directory.path().join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { directory, issuer: Issuer::new(params, key) }
    }

    fn write(&self, name: &str) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(name, "pem"), certificate.pem()).unwrap();
        std::fs::write(self.path(name, "key"), key.serialize_pem()).unwrap();
    }

    fn path(&self, name: &str, extension: &str) -> std::path::PathBuf {
        self.directory.path().join(name).with_extension(extension)
    }

    /// A gate that shows the certificate of `server`, and asks for one if `mutual`.
    fn gate(&self, mutual: bool) -> Gate {
        let show = |name, extension| self.path(name, extension).display().to_string();
        let authority = if mutual { format!("authority = '{}'", show("ca", "pem")) } else { String::new() };
        let tls = format!("certificate = '{}'\nkey = '{}'\n{authority}", show("server", "pem"), show("server", "key"));
        let mut config = Config::new(([127, 0, 0, 1], 1), "s", "models");
        config.clients.tls = Some(toml::from_str(&tls).unwrap());
        Gate { limits: limits(), ..Gate::open(&config).unwrap() }
    }

    /// Connects, as the holder of a certificate or as nobody.
    async fn connect(
        &self,
        address: SocketAddr,
        holder: Option<&str>,
        alpn: &[u8],
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca", "pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        let mut config = match holder {
            None => builder.with_no_client_auth(),
            Some(name) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_file(self.path(name, "pem")).unwrap()],
                    PrivateKeyDer::from_pem_file(self.path(name, "key")).unwrap(),
                )
                .unwrap(),
        };
        config.alpn_protocols = vec![alpn.to_vec()];
        let name = ServerName::try_from("server").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
    }
}

#[test]
fn connections_are_encrypted_and_both_protocols_negotiated() {
    let authority = Authority::new();
    authority.write("server");
    with_gate(authority.gate(false), async |address, peer| {
        let mut stream = authority.connect(address, None, b"http/1.1").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        is_served(&mut stream).await;
        is_served(&mut stream).await;

        let stream = authority.connect(address, None, b"h2").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::task::spawn_local(async move { connection.await.is_ok() });
        let (response, _) = client.send_request(Request::get("https://server/v2").body(()).unwrap(), true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);

        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(&get_of("/v2")).await.unwrap();
        let mut heard = Vec::new();
        let _ = plain.read_to_end(&mut heard).await;
        assert!(!heard.starts_with(b"HTTP"), "found {heard:?}, expected an alert at most");
        assert_eq!(refused(&peer, "handshake"), 1);
    });
}

#[test]
fn only_holders_of_a_certificate_are_served_where_one_is_asked_for() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    ["server", "client"].iter().for_each(|name| authority.write(name));
    stranger.write("client");
    // A client of another authority that nevertheless trusts this one.
    for extension in ["pem", "key"] {
        std::fs::copy(stranger.path("client", extension), authority.path("stranger", extension)).unwrap();
    }
    with_gate(authority.gate(true), async |address, peer| {
        is_served(&mut authority.connect(address, Some("client"), b"http/1.1").await.unwrap()).await;
        for holder in [None, Some("stranger")] {
            // TLS 1.3: a client learns with the first bytes it reads that it was refused.
            let served = match authority.connect(address, holder, b"http/1.1").await {
                Ok(mut stream) => stream.write_all(&get_of("/v2")).await.is_ok() && hear(&mut stream).await.is_some(),
                Err(_) => false,
            };
            assert!(!served, "{holder:?}");
        }
        assert_eq!(refused(&peer, "handshake"), 2);
        is_served(&mut authority.connect(address, Some("client"), b"http/1.1").await.unwrap()).await;
    });
}

#[test]
fn a_handshake_that_does_not_come_ends_its_connection() {
    let authority = Authority::new();
    authority.write("server");
    let gate = authority.gate(false);
    let limits = Limits { head_timeout: Duration::from_millis(30), ..gate.limits };
    with_gate(Gate { limits, ..gate }, async |address, peer| {
        let mut silent = TcpStream::connect(address).await.unwrap();
        let _ = silent.read_to_end(&mut Vec::new()).await;
        while refused(&peer, "handshake") == 0 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn wrong_limits_and_files_are_named() {
    let config = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::new(([127, 0, 0, 1], 1), "s", "models");
        change(&mut config);
        Gate::open(&config).map(drop).unwrap_err()
    };
    assert_eq!(config(&|c| c.head_bytes_max = 1 << 30), "head_bytes_max: found 1073741824, expected 1 to 262144");
    assert_eq!(config(&|c| c.requests_max = 0), "requests_max: found 0, expected at least 1");
    let found = config(&|c| c.client_connections_max = 0);
    assert_eq!(found, "client_connections_max: found 0, expected at least 1");
    let missing = config(&|c| c.clients.tls = Some(toml::from_str("certificate = '/nowhere/c'\nkey = 'k'").unwrap()));
    assert!(missing.starts_with("clients.tls.certificate: /nowhere/c: "), "{missing}");
}
