//! What pages in a browser on our network can make it send: requests that change something, which a browser sends to
//! any site without asking if they look like a form's, and any request once a name of theirs leads to our address (DNS
//! rebinding). Programs send none of the fields that tell a browser.

use std::net::{IpAddr, Ipv6Addr};

use frontend::excerpt;
use hyper::{
    Request, Version,
    header::{ACCEPT_LANGUAGE, CONTENT_TYPE, HOST, HeaderMap, HeaderName, ORIGIN, REFERER},
};

use crate::access::Refusal;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Fields of which a browser sends one at least, whatever a page wants: over plain HTTP it leaves out `Sec-Fetch-Site`
/// and, of a GET to the page's own host, `Origin`; a page can choose what is in `Accept-Language`, and not that it is
/// there.
const BROWSERS_FIELDS: [HeaderName; 4] = [SEC_FETCH_SITE, ORIGIN, REFERER, ACCEPT_LANGUAGE];
/// What a form, and so a page of any site, can send without being asked (Fetch, "CORS-safelisted request-header").
const FORM_TYPES: [&str; 3] = ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"];

/// The names by which browsers may reach us. Programs may by any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hosts {
    /// All.
    Any,
    /// `localhost`, IP addresses, and these.
    Named(Vec<String>),
}

impl Hosts {
    /// Those of the key `clients.hosts`; by default any name where tokens are asked for, which no page of another site
    /// has, else none.
    pub(crate) fn new(hosts: Option<&[String]>, has_tokens: bool) -> Self {
        match hosts {
            None if has_tokens => Self::Any,
            Some(names) if names.iter().any(|name| name == "*") => Self::Any,
            names => Self::Named(names.unwrap_or_default().to_vec()),
        }
    }

    /// Checks for whom an unencrypted request is that may be a browser's. Browsers speak HTTP/2 only where a
    /// certificate has shown who we are.
    ///
    /// # Errors
    /// If it is for another host.
    pub(crate) fn check<B>(&self, request: &Request<B>) -> Result<(), Refusal> {
        let Self::Named(names) = self else { return Ok(()) };
        let is_browsers = BROWSERS_FIELDS.iter().any(|name| request.headers().contains_key(name));
        if request.version() >= Version::HTTP_2 || !is_browsers {
            return Ok(());
        }
        for host in hosts_of(request) {
            let name = name_of(host).trim_end_matches('.');
            let is_local = name.eq_ignore_ascii_case("localhost") || is_address(name);
            if !is_local && !names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
                return Err(Refusal::Host { found: excerpt(host) });
            }
        }
        Ok(())
    }
}

/// Checks that a head names one host and one origin at most, before either is looked at.
///
/// # Errors
/// If it names several.
pub(crate) fn check_named_once<B>(request: &Request<B>) -> Result<(), Refusal> {
    for (name, field) in [(&HOST, "Host"), (&ORIGIN, "Origin")] {
        if request.headers().get_all(name).iter().nth(1).is_some() {
            return Err(Refusal::Repeated { field });
        }
    }
    Ok(())
}

/// Checks a request that would change something, of which [`check_named_once`] holds.
///
/// # Errors
/// If a page of another site may have sent it.
pub(crate) fn check_same_site<B>(request: &Request<B>) -> Result<(), Refusal> {
    let headers = request.headers();
    let refuse = |field, found: &str, expected| Err(Refusal::CrossSite { field, found: excerpt(found), expected });
    for site in texts(headers, &SEC_FETCH_SITE) {
        if !["same-origin", "none"].contains(&site) {
            return refuse("Sec-Fetch-Site", site, "same-origin or none");
        }
    }
    for origin in texts(headers, &ORIGIN) {
        if !hosts_of(request).any(|host| is_origin_of(origin, host)) {
            return refuse("Origin", origin, "the Host");
        }
    }
    for media in texts(headers, &CONTENT_TYPE) {
        let essence = media.split(';').next().unwrap_or_default().trim();
        if FORM_TYPES.iter().any(|form| form.eq_ignore_ascii_case(essence)) {
            return refuse("Content-Type", media, "application/json");
        }
    }
    Ok(())
}

/// The values of a field; what is no text is what nobody expects.
fn texts<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("bytes that are no text"))
}

/// For whom a request is: its target's authority (which goes before, RFC 9112, section 3.2.2) and the `Host` field.
fn hosts_of<B>(request: &Request<B>) -> impl Iterator<Item = &str> {
    let authority = request.uri().authority().map(hyper::http::uri::Authority::as_str);
    authority.into_iter().chain(texts(request.headers(), &HOST))
}

/// A host without its port (RFC 3986, section 3.2.2).
fn name_of(host: &str) -> &str {
    if host.starts_with('[') {
        return host.split_inclusive(']').next().unwrap_or(host);
    }
    host.split_once(':').map_or(host, |(name, _)| name)
}

fn is_address(name: &str) -> bool {
    let v6 = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    v6.map_or_else(|| name.parse::<IpAddr>().is_ok(), |inner| inner.parse::<Ipv6Addr>().is_ok())
}

/// Whether an origin (RFC 6454, section 6.2) is that of pages of this host.
fn is_origin_of(origin: &str, host: &str) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    let port = if scheme.eq_ignore_ascii_case("https") { ":443" } else { ":80" };
    let bare = |text: &str| text.strip_suffix(port).unwrap_or(text).to_ascii_lowercase();
    bare(authority) == bare(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::post("/v2/logging");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    #[test]
    fn programs_and_our_own_pages_are_served() {
        for fields in [
            &[("host", "127.0.0.1:8000")][..],
            &[("host", "h"), ("content-type", "application/json")],
            &[("host", "h"), ("content-type", "application/octet-stream")],
            &[("host", "h:8000"), ("origin", "http://H:8000"), ("sec-fetch-site", "same-origin")],
            &[("host", "h"), ("origin", "https://h:443")],
            &[("host", "h:80"), ("origin", "http://h"), ("sec-fetch-site", "none")],
        ] {
            assert_eq!(check_same_site(&request(fields)), Ok(()), "{fields:?}");
        }
    }

    #[test]
    fn what_another_sites_page_can_send_is_refused_and_named() {
        for (field, value, expected) in [
            ("sec-fetch-site", "cross-site", "Sec-Fetch-Site: found 'cross-site', expected same-origin or none: pages"),
            ("sec-fetch-site", "same-site", "Sec-Fetch-Site: found 'same-site'"),
            ("origin", "http://evil.example", "Origin: found 'http://evil.example', expected the Host"),
            ("origin", "http://127.0.0.1:9000", "Origin: found"),
            ("origin", "https://127.0.0.1:8000.evil.example", "Origin: found"),
            ("origin", "null", "Origin: found 'null'"),
            ("content-type", "text/plain;charset=UTF-8", "Content-Type: found 'text/plain;charset=UTF-8', expected"),
            ("content-type", "Multipart/Form-Data; boundary=x", "Content-Type: found"),
            ("content-type", "application/x-www-form-urlencoded", "Content-Type: found"),
        ] {
            let refusal = check_same_site(&request(&[("host", "127.0.0.1:8000"), (field, value)])).unwrap_err();
            assert!(refusal.to_string().starts_with(expected), "{refusal}");
        }
        // A second field does not hide the first.
        let twice = request(&[("host", "h"), ("origin", "http://evil.example"), ("origin", "http://h")]);
        assert!(check_same_site(&twice).is_err());
    }

    /// Each origin was compared with each host: 700 of both, 1.5 KB of HTTP/2, took 25 ms.
    #[test]
    fn a_host_or_an_origin_more_is_refused() {
        for (field, named) in [("host", "Host"), ("origin", "Origin")] {
            let refusal = check_named_once(&request(&[(field, "h"), ("x", "y"), (field, "h")])).unwrap_err();
            assert_eq!(refusal.to_string(), format!("{named}: found it more than once, expected it once"));
        }
        assert_eq!(
            check_named_once(&request(&[("host", "h"), ("origin", "http://h"), ("x", "y"), ("x", "y")])),
            Ok(())
        );
        let absolute = Request::get("http://h/v2").header("host", "h").body(()).unwrap();
        assert_eq!(check_named_once(&absolute), Ok(()), "an authority beside the field");
    }

    #[test]
    fn without_tokens_only_names_that_cannot_be_rebound_lead_browsers_here() {
        let check = |hosts: &Hosts, host: &str| hosts.check(&request(&[("host", host), ("referer", "x")])).is_ok();
        let hosts = Hosts::new(None, false);
        for host in
            ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[2001:db8::1]"]
        {
            assert!(check(&hosts, host), "{host}");
        }
        for host in
            ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "[x]"]
        {
            assert!(!check(&hosts, host), "{host}");
        }
        let named = Hosts::new(Some(&["serve.example".to_owned()]), true);
        assert!(check(&named, "Serve.Example:80") && check(&named, "127.0.0.1") && !check(&named, "evil.example"));
        assert!(check(&Hosts::new(None, true), "evil.example") && check(&Hosts::new(Some(&["*".into()]), false), "x"));
        assert_eq!(hosts.check(&request(&[])), Ok(()), "HTTP/1.0: no browser");
        let absolute = Request::get("http://evil.example/v2").header("host", "localhost");
        let refusal = hosts.check(&absolute.header("accept-language", "").body(()).unwrap()).unwrap_err().to_string();
        let expected = "Host: found 'evil.example' from a browser, expected localhost, an IP address, or a name in \
                        hosts = [\"evil.example\"] of the table [clients]";
        assert_eq!(refusal, expected);
    }

    #[test]
    fn programs_come_by_any_name() {
        let hosts = Hosts::new(None, false);
        for host in ["downbeat", "downbeat.serving.svc.cluster.local:8000", "serve.example"] {
            let fields = [("host", host), ("user-agent", "python-requests/2"), ("content-type", "application/json")];
            assert_eq!(hosts.check(&request(&fields)), Ok(()), "{host}");
            for field in ["origin", "sec-fetch-site", "referer", "accept-language"] {
                assert!(hosts.check(&request(&[("host", host), (field, "same-origin")])).is_err(), "{field}");
            }
        }
    }
}
