//! The server of a load: where it is, how it is known (TLS), and what shows it who we are (a bearer token).

use std::sync::Arc;

use hyper::header::HeaderValue;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::{ClientConfig, RootCertStore};

use crate::target::{Target, Wire};

/// Of a client that speaks no TLS, although its connector could.
fn trusting_nobody() -> ClientConfig {
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has suites of TLS 1.3")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth()
}

/// What clients need to know.
pub(crate) struct Server {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub(crate) origin: String,
    /// Of the header `authorization`.
    pub(crate) authorization: Option<HeaderValue>,
    pub(crate) connector: HttpsConnector<HttpConnector>,
}

impl Server {
    /// # Panics
    /// If the target's token is none: [`authorization`] is asked before.
    pub(crate) fn new(target: &Target) -> Self {
        let (origin, config) = match &target.tls {
            Some(tls) => (format!("https://{}", tls.authority), ClientConfig::clone(&tls.config)),
            None => (format!("http://{}", target.address), trusting_nobody()),
        };
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        let builder = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http();
        let connector = match target.wire {
            Wire::Http(_) => builder.enable_http1().wrap_connector(http),
            Wire::Grpc => builder.enable_http2().wrap_connector(http),
        };
        let authorization = target.token.as_deref().map(|token| authorization(token).expect("it was checked"));
        Self { origin, authorization, connector }
    }
}

/// A bearer token as a header (RFC 6750); `None` if it has characters that no header may have.
pub(crate) fn authorization(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}
