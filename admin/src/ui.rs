//! `/ui`: a page for browsers, of what members tell as JSON. Its files are in the binary, and all paths in them are
//! relative, so that it works behind any prefix of a proxy. It shows and changes nothing, and asks nobody but the
//! listener that it is from, which its policy has browsers enforce (Content Security Policy, level 3).

/// A file's path, its content type, and what is in it.
const FILES: [(&str, &str, &str); 3] = [
    ("/ui", "text/html; charset=utf-8", include_str!("ui/page.html")),
    ("/ui/page.css", "text/css; charset=utf-8", include_str!("ui/page.css")),
    ("/ui/page.js", "text/javascript; charset=utf-8", include_str!("ui/page.js")),
];

/// Header fields of all files. No other page can frame it, and a form of it can be sent nowhere.
pub(crate) const FIELDS: &[(&str, &str)] = &[
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    ("referrer-policy", "no-referrer"),
];

/// A slash at its end would be another folder: relative to where it is, whatever is before it.
pub(crate) const ELSEWHERE: (&str, &[(&str, &str)]) = ("/ui/", &[("location", "../ui")]);

/// The content type and the text of the file at a path.
pub(crate) fn file(path: &str) -> Option<(&'static str, &'static str)> {
    FILES.iter().find(|(at, ..)| *at == path).map(|(_, content_type, text)| (*content_type, *text))
}
