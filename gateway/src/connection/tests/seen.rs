//! Who may be told of whose requests.

use super::{secure::bearer, *};

const ONE: &str = "a-token-of-sixteen-bytes";
const OTHER: &str = "another-token-of-sixteen-bytes";
const ELSEWHERE: &str = "of-no-model-that-was-asked";
const OPERATOR: &str = "one-of-all-models-that-are";

fn gate() -> Gate {
    let token = |secret: &str, models: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), secret).unwrap();
        let path = file.path().display().to_string();
        let allow = format!("{{ operations = ['infer', 'debug'], models = ['{models}'] }}");
        (format!("[[token]]\nname = '{secret}'\nfile = '{path}'\nallow = {allow}\n"), file)
    };
    let tokens = [token(ONE, "dou*"), token(OTHER, "double"), token(ELSEWHERE, "triple"), token(OPERATOR, "*")];
    let text: String = tokens.iter().map(|(text, _)| text.as_str()).collect();
    Gate { grants: toml::from_str::<Clients>(&text).unwrap().grants().unwrap(), ..open_gate(limits()) }
}

/// A token for one model could read all requests of others, by their numbers.
#[test]
fn who_may_not_ask_about_all_models_is_told_of_its_own_requests() {
    with_gate(gate(), async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut stream, &bearer(&post_of(INFER, "", GOOD.as_bytes()), ONE)).await.status, 200);
        for (request, token, expected) in [
            ("1", ONE, 200),
            ("q", ONE, 200),
            ("1", OPERATOR, 200),
            ("1", OTHER, 404),
            ("q", OTHER, 404),
            ("1", ELSEWHERE, 404),
            ("2", OPERATOR, 404),
        ] {
            let heard = ask(&mut stream, &bearer(&get_of(&format!("/debug/requests/{request}")), token)).await;
            assert_eq!(heard.status, expected, "{request} by {token}: {heard:?}");
            let found = format!("request: found '{request}', expected a number (1 to 1)");
            assert!(expected == 200 || heard.json()["error"].as_str().unwrap().starts_with(&found), "{heard:?}");
        }
    });
}
