use proptest::prelude::*;

use super::*;

const HOME: Client = Client::Address(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
const T0: Timestamp = Timestamp(0);

fn access(toml: &str, requests_max: usize) -> Access {
    Access::new(toml::from_str::<Clients>(toml).unwrap().grants().unwrap(), requests_max)
}

/// The digest of `open sesame, please`.
const DIGEST: &str = "7b467437ad0215a143a8d995fea9a9e55d93a0c2ff3367e4a7990aec3f6fbd6b";

fn token(allow: &str) -> String {
    format!("[[token]]\nname = 'x'\nsha256 = '{}'\nallow = {{ {allow} }}\n", hex(&digest::digest_of(SECRET)))
}

const SECRET: &[u8] = b"open sesame, please";

fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn digests_are_what_sha256sum_prints() {
    assert_eq!(hex(&digest::digest_of(SECRET)), DIGEST);
}

#[test]
fn without_tokens_everything_is_allowed_and_authorization_is_for_others() {
    let access = access("", 9);
    let anyone = access.authenticate(Some(b"for a proxy")).unwrap();
    for operation in Operation::ALL {
        let permitted = access.permit(anyone, operation, Scope::AllModels).is_ok();
        assert_eq!(permitted, operation != Operation::Drain, "{operation:?}");
    }
}

#[test]
fn other_grants_cut_nobody_off_but_let_nobody_in_who_was_left_out() {
    let named = |name: &str, secret: &[u8], max: usize| {
        token(&format!("operations = ['infer'], requests_max = {max}"))
            .replace("'x'", &format!("'{name}'"))
            .replace(DIGEST, &hex(&digest::digest_of(secret)))
    };
    let grants = |toml: &str| toml::from_str::<Clients>(toml).unwrap().grants().unwrap();
    let mut access = access(&format!("{}{}", named("a", b"old secret of a", 2), named("b", b"secret of b", 1)), 9);
    let [a, b] = [&b"old secret of a"[..], b"secret of b"].map(|secret| access.authenticate(Some(secret)).unwrap());
    access.handle_request(T0, a, HOME).unwrap();
    access.handle_request(T0, b, HOME).unwrap();

    access.handle_grants(grants(&format!("{}{}", named("c", b"secret of c", 1), named("a", b"new secret of a", 1))), 3);
    assert_eq!(access.authenticate(Some(b"new secret of a")), Ok(a), "its holder is the same");
    assert_eq!(access.handle_request(T0, a, HOME), Err(Refusal::Busy { max: 1 }), "what was under way still counts");
    for gone in [&b"old secret of a"[..], b"secret of b"] {
        assert!(access.authenticate(Some(gone)).is_err());
    }
    let withdrawn = Refusal::Unauthenticated { found: "a token that has been withdrawn" };
    assert_eq!(access.permit(b, Operation::Infer, Scope::Server), Err(withdrawn), "the next message of a stream");
    let c = access.authenticate(Some(b"secret of c")).unwrap();
    access.handle_request(T0, c, HOME).unwrap();
    assert_eq!(access.requests(), 3);
    [a, b, c].into_iter().for_each(|grant| access.handle_end(grant));

    assert!(!access.knows(Client::Token(b)) && access.knows(Client::Token(a)) && access.knows(HOME));

    access.handle_grants(grants(&named("d", b"secret of d", 1)), 3);
    assert_eq!(access.grants.len(), 2, "who is left out and has nothing under way is forgotten");
    assert_eq!(access.authenticate(Some(b"secret of d")), Ok(GrantId(4)), "no number is used twice");
    access.handle_grants(grants(""), 3);
    assert_eq!(access.authenticate(Some(b"for a proxy")), Ok(ANONYMOUS), "no token is left");
    assert_eq!(access.permit(ANONYMOUS, Operation::Infer, Scope::AllModels), Ok(()));
}

#[test]
fn a_token_covers_its_operations_on_its_models() {
    let access = access(&token("operations = ['infer', 'metadata'], models = ['digits', 'resnet*']"), 9);
    let holder = access.authenticate(Some(SECRET)).unwrap();
    let permit = |operation, scope| access.permit(holder, operation, scope);
    assert_eq!(permit(Operation::Infer, Scope::Model("digits")), Ok(()));
    assert_eq!(permit(Operation::Metadata, Scope::Model("resnet50")), Ok(()));
    assert_eq!(permit(Operation::Metadata, Scope::Server), Ok(()));
    for (operation, scope, wanted) in [
        (Operation::Infer, Scope::Model("digits2"), "infer of model 'digits2'"),
        (Operation::Infer, Scope::Model("resne"), "infer of model 'resne'"),
        (Operation::Metadata, Scope::AllModels, "metadata of all models"),
        (Operation::Metrics, Scope::Server, "metrics"),
    ] {
        let forbidden = Refusal::Forbidden { name: "x".into(), wanted: wanted.into() };
        assert_eq!(permit(operation, scope), Err(forbidden));
    }
    let unknown = access.authenticate(Some(b"open sesame, pleasf"));
    assert_eq!(unknown, Err(Refusal::Unauthenticated { found: "an unknown token" }));
    let anyone = access.authenticate(None).unwrap();
    assert_eq!(access.permit(anyone, Operation::Health, Scope::Server), Ok(()));
    let none = Err(Refusal::Unauthenticated { found: "no token" });
    assert_eq!(access.permit(anyone, Operation::Infer, Scope::Model("digits")), none);
}

/// There is no token to bring: whoever may configure the server is told which key there is for one.
#[test]
fn where_no_token_is_configured_the_key_is_named() {
    let anyone = access("[anonymous]\noperations = ['health', 'infer']", 9);
    for token in [None, Some(SECRET)] {
        let holder = anyone.authenticate(token).unwrap();
        assert_eq!(anyone.permit(holder, Operation::Infer, Scope::Model("digits")), Ok(()));
        let refused = anyone.permit(holder, Operation::Drain, Scope::Server).unwrap_err();
        assert_eq!(refused, Refusal::NoTokens { wanted: "drain" });
        let text = refused.to_string();
        assert!(text.contains("no token is configured") && text.contains("set [[clients.token]]"), "{text}");
    }
}

/// Whoever counts refusals by their words counts one reason.
#[test]
fn a_wait_is_told_in_whole_milliseconds() {
    for (ns, told) in
        [(0, "0 ms"), (994, "1 ms"), (1_000_001, "2 ms"), (7_000_000, "7 ms"), (61_000_000_000, "61000 ms")]
    {
        let text = Refusal::Rate { retry_after: Span(ns) }.to_string();
        assert!(text.ends_with(&format!("try again in {told}")), "{text}");
    }
}

#[test]
fn clients_without_a_token_have_a_rate_for_each_subscriber() {
    let mut access = access("[anonymous]\nrequests_per_second = 1\nburst = 2", 9);
    let mut request = |from: &str| {
        let from = Client::at(from.parse().unwrap());
        access.handle_request(T0, ANONYMOUS, from).map(|()| access.handle_end(ANONYMOUS)).is_ok()
    };
    assert!(request("10.0.0.1") && request("10.0.0.1") && !request("10.0.0.1") && !request("::ffff:10.0.0.1"));
    assert!(request("10.0.0.2"));
    assert!(request("2001:db8::1") && request("2001:db8::2") && !request("2001:db8::3"));
    assert!(request("2001:db8:0:1::1"));
}

proptest! {
    /// However requests of three grants come and go, what is under way is what was counted, and within every limit.
    #[test]
    fn requests_under_way_stay_within_their_limits(steps in prop::collection::vec((0usize..3, any::<bool>()), 1..100)) {
        let second = token("operations = ['*'], requests_max = 3")
            .replace("'x'", "'y'")
            .replace(&DIGEST[..4], "abcd");
        let first = token("operations = ['*'], requests_max = 2");
        let mut access = access(&format!("{first}{second}"), 6);
        let limits = [usize::MAX, 2, 3];
        let mut under_way = [0usize; 3];
        for (index, begins) in steps {
            let total: usize = under_way.iter().sum();
            if begins {
                let expected = if total == 6 {
                    Err(Refusal::Overloaded { max: 6 })
                } else if under_way[index] == limits[index] {
                    Err(Refusal::Busy { max: limits[index] })
                } else {
                    Ok(())
                };
                let found = access.handle_request(T0, GrantId(index), HOME);
                under_way[index] += usize::from(found.is_ok());
                prop_assert_eq!(found, expected);
            } else if under_way[index] > 0 {
                access.handle_end(GrantId(index));
                under_way[index] -= 1;
            }
        }
    }
}
