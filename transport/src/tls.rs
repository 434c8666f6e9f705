//! Mutual TLS under the bootstrap: both ends show a certificate of one authority before anything else is said, and
//! everything that follows is encrypted. The bytes of the bootstrap do not change; the queue pairs' packets are not
//! covered (RoCEv2 has no encryption), so keys and queue pair numbers are what this keeps from strangers.
//!
//! The name in a certificate is the cluster's, not a host's: members come and go and are dialled by address, and what
//! must be known is that the other end belongs to this cluster.
//!
//! Servers of clients read their certificates here, too ([`ServerTlsFiles`]), and speak TLS by themselves.

use std::{
    fmt::Display,
    io::{self, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection, SignatureAlgorithm,
    SupportedProtocolVersion,
    client::verify_server_name,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::{ParsedCertificate, WebPkiClientVerifier},
};

use serde::{Deserialize, Serialize};

use crate::{OpenError, certificates::note_shown, error::TlsError};

/// Certificates of a member, as files in PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This member's certificate, and those between it and the authority's.
    pub certificate: PathBuf,
    /// Its private key (PKCS #8, PKCS #1 or SEC 1).
    pub key: PathBuf,
    /// The certificates of the authorities that members' certificates come from.
    pub authority: PathBuf,
    /// The DNS name that every member's certificate carries.
    #[serde(default = "default_name")]
    pub name: String,
}

fn default_name() -> String {
    "downbeat".into()
}

/// Certificates of a server whose clients are strangers, as files in PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerTlsFiles {
    /// The server's certificate, and those between it and the authority's that clients know.
    pub certificate: PathBuf,
    /// Its private key (PKCS #8, PKCS #1 or SEC 1).
    pub key: PathBuf,
    /// The certificates of the authorities that clients' certificates come from; without it, clients show none.
    #[serde(default)]
    pub authority: Option<PathBuf>,
}

impl ServerTlsFiles {
    /// Reads the files, which the table of this name in a configuration names. TLS 1.3 only.
    ///
    /// # Errors
    /// One line that names the key and the file, and what is wrong with it.
    pub fn load(&self, table: &str) -> Result<ServerConfig, OpenError> {
        let pem = Pem { table };
        let roots = self.authority.as_ref().map(|authority| pem.roots(authority)).transpose()?;
        let server = pem.server(&self.certificate, &self.key, roots.zip(self.authority.as_deref()))?;
        pem.note_shown(&self.certificate)?;
        Ok(server)
    }

    /// Whether its key is RSA, with which a signature takes 10 to 50 times as long as on a curve.
    ///
    /// # Errors
    /// One line that names the key and the file, and what is wrong with it.
    pub fn has_rsa_key(&self, table: &str) -> Result<bool, OpenError> {
        let pem = Pem { table };
        let key = provider().key_provider.load_private_key(pem.private(&self.key)?);
        let key = key.map_err(|error| pem.wrong("key", &self.key, &error))?;
        Ok(key.algorithm() == SignatureAlgorithm::RSA)
    }
}

/// What a client needs of a server that it knows by the authorities in a file (PEM), which the key of this name in a
/// configuration names. TLS 1.3 only; the client shows no certificate.
///
/// # Errors
/// One line that names the key and the file, and what is wrong with it.
pub fn client_tls(key: &str, authority: &Path) -> Result<ClientConfig, OpenError> {
    let wrong = |cause: &dyn Display| unusable(key.to_owned(), authority, cause);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(authority).map_err(|error| wrong(&error))? {
        let added = certificate
            .map_err(|error| wrong(&error))
            .and_then(|found| roots.add(found).map_err(|error| wrong(&error)));
        added?;
    }
    if roots.is_empty() {
        return Err(wrong(&"no certificate in it"));
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(VERSIONS);
    Ok(builder.map_err(|error| wrong(&error))?.with_root_certificates(roots).with_no_client_auth())
}

/// What is needed to speak TLS with other members.
#[derive(Clone)]
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads the files. TLS 1.3 only.
    ///
    /// # Errors
    /// One line that names the key and the file, and what is wrong with it.
    pub(crate) fn load(files: &TlsFiles) -> Result<Self, OpenError> {
        let pem = Pem { table: "tls" };
        let TlsFiles { certificate, key, authority, name } = files;
        let (chain, roots) = (pem.certificates("certificate", certificate)?, pem.roots(authority)?);
        let wrong = |error| pem.unfit(certificate, &error);
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(VERSIONS)
            .map_err(wrong)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain, pem.private(key)?)
            .map_err(wrong)?;
        let server = pem.server(certificate, key, Some((roots, authority)))?;
        pem.note_shown(certificate)?;
        let name = ServerName::try_from(name.clone())
            .map_err(|error| TlsError::Name { name: files.name.clone(), cause: error.to_string() })?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name })
    }

    /// Whether it was loaded together with the other.
    #[cfg(test)]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.client, &other.client)
    }
}

const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A file that a key of a configuration names cannot be used.
fn unusable(key: String, path: &Path, cause: &dyn Display) -> OpenError {
    TlsError::File { key, path: path.to_owned(), cause: cause.to_string() }.into()
}

/// Reads what a table of a configuration names.
struct Pem<'a> {
    table: &'a str,
}

impl Pem<'_> {
    fn wrong(&self, key: &str, path: &Path, cause: &dyn Display) -> OpenError {
        unusable(format!("{}.{key}", self.table), path, cause)
    }

    /// The certificate and the key do not fit each other, or nobody could use them.
    fn unfit(&self, certificate: &Path, error: &rustls::Error) -> OpenError {
        self.wrong(&format!("certificate and {}.key", self.table), certificate, error)
    }

    fn certificates(&self, key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, OpenError> {
        let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match read {
            Ok(found) if found.is_empty() => Err(self.wrong(key, path, &"no certificate in it")),
            read => read.map_err(|error| self.wrong(key, path, &error)),
        }
    }

    /// Notes when what is shown from now on ends, for operators.
    fn note_shown(&self, certificate: &Path) -> Result<(), OpenError> {
        let chain = self.certificates("certificate", certificate)?;
        note_shown(&format!("{}.certificate", self.table), &chain);
        Ok(())
    }

    fn private(&self, path: &Path) -> Result<PrivateKeyDer<'static>, OpenError> {
        PrivateKeyDer::from_pem_file(path).map_err(|error| self.wrong("key", path, &error))
    }

    fn roots(&self, path: &Path) -> Result<Arc<RootCertStore>, OpenError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates("authority", path)? {
            roots.add(certificate).map_err(|error| self.wrong("authority", path, &error))?;
        }
        Ok(Arc::new(roots))
    }

    /// A server's side; with authorities, clients must show a certificate of one of them.
    fn server(
        &self,
        certificate: &Path,
        key: &Path,
        authority: Option<(Arc<RootCertStore>, &Path)>,
    ) -> Result<ServerConfig, OpenError> {
        let wrong = |error| self.unfit(certificate, &error);
        let builder =
            ServerConfig::builder_with_provider(provider()).with_protocol_versions(VERSIONS).map_err(wrong)?;
        let builder = match authority {
            None => builder.with_no_client_auth(),
            Some((roots, path)) => builder.with_client_cert_verifier(
                WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|error| self.wrong("authority", path, &error))?,
            ),
        };
        builder.with_single_cert(self.certificates("certificate", certificate)?, self.private(key)?).map_err(wrong)
    }
}

/// A byte stream that never blocks: TCP, or TLS on it.
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<TlsWire>),
}

pub(crate) struct TlsWire {
    stream: TcpStream,
    connection: Connection,
    /// The name that the peer's certificate must still be checked for.
    unchecked: Option<ServerName<'static>>,
}

impl Wire {
    /// The end that connected.
    pub(crate) fn client(tls: Option<&Tls>, stream: TcpStream) -> Self {
        let Some(tls) = tls else { return Self::Plain(stream) };
        let connection = ClientConnection::new(Arc::clone(&tls.client), tls.name.clone());
        let connection = connection.expect("a checked configuration").into();
        Self::Tls(Box::new(TlsWire { stream, connection, unchecked: None }))
    }

    /// The end that accepted.
    pub(crate) fn server(tls: Option<&Tls>, stream: TcpStream) -> Self {
        let Some(tls) = tls else { return Self::Plain(stream) };
        let connection = ServerConnection::new(Arc::clone(&tls.server)).expect("a checked configuration").into();
        // A client proves that it has a certificate of the authority; that it is a member's is for us to check.
        Self::Tls(Box::new(TlsWire { stream, connection, unchecked: Some(tls.name.clone()) }))
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(wire) => &wire.stream,
        }
    }

    /// Whether bytes wait here for the socket, beside those that `write` has not taken.
    pub(crate) fn wants_write(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(wire) => wire.connection.wants_write(),
        }
    }

    /// Moves what waits here to the socket, as far as it takes it.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(wire) => wire.flush(),
        }
    }

    /// Reads what has come; `WouldBlock` if that is nothing.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(into),
            Self::Tls(wire) => wire.read(into),
        }
    }

    /// Takes bytes; they are on their way when [`Self::wants_write`] is false.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(wire) => wire.write(bytes),
        }
    }
}

impl TlsWire {
    fn flush(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.stream)?;
        }
        Ok(())
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The end of the stream without TLS's own: as with TCP, whoever ends it has its reasons.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            let received = self.connection.read_tls(&mut self.stream)?;
            let processed = self.connection.process_new_packets();
            if let Err(error) = processed {
                // An alert tells the peer why.
                let _ = self.flush();
                return Err(io::Error::new(io::ErrorKind::InvalidData, refusal(&error)));
            }
            self.check_name()?;
            if received == 0 {
                return Ok(0);
            }
        }
    }

    /// Nothing is handed out before the name is checked: a client's certificate comes with its last handshake message.
    fn check_name(&mut self) -> io::Result<()> {
        let (Some(name), Some([certificate, ..])) = (&self.unchecked, self.connection.peer_certificates()) else {
            return Ok(());
        };
        let checked = ParsedCertificate::try_from(certificate).and_then(|parsed| verify_server_name(&parsed, name));
        checked.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, refusal(&error)))?;
        self.unchecked = None;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush()?;
        self.connection.writer().write(bytes)
    }
}

fn refusal(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidMessage(_) => "it does not speak TLS; do both ends have [tls] configured?".into(),
        error => format!("TLS: {error}"),
    }
}

#[cfg(test)]
mod tests;
