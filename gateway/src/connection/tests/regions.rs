//! Shared memory belongs to the client that registered it.

use super::{secure::bearer, *};

const ONE: &str = "a-token-of-sixteen-bytes";
const OTHER: &str = "another-token-of-sixteen-bytes";
const INFERS: &str = "infers-and-no-more-than-that";

/// Tokens of two clients, and of one that may not have shared memory.
fn gate() -> Gate {
    let token = |name: &str, secret: &str, operations: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), secret).unwrap();
        let path = file.path().display().to_string();
        (format!("[[token]]\nname = '{name}'\nfile = '{path}'\nallow.operations = [{operations}]\n"), file)
    };
    let all = "'infer', 'shared_memory'";
    let tokens = [token("x", ONE, all), token("y", OTHER, all), token("z", INFERS, "'infer'")];
    let text: String = tokens.iter().map(|(text, _)| text.as_str()).collect();
    Gate { grants: toml::from_str::<Clients>(&text).unwrap().grants().unwrap(), ..open_gate(limits()) }
}

#[test]
fn nobody_sees_reads_writes_or_unregisters_anothers_region() {
    with_gate(gate(), async |address, peer| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("shm"), [1, 2, 3, 4, 0, 0, 0, 0]).unwrap();
        *peer.server.service.regions.borrow_mut() = crate::regions::AllRegions::new(folder.path());
        let mut stream = TcpStream::connect(address).await.unwrap();
        let register = post_of("/v2/systemsharedmemory/region/r/register", "", br#"{"key":"/shm","byte_size":8}"#);
        let infer = |offset| {
            let at = |offset| {
                let bytes = "shared_memory_byte_size";
                json!({ "shared_memory_region": "r", bytes: 4, "shared_memory_offset": offset })
            };
            let input = json!({ "name": "x", "shape": [1, 4], "datatype": "UINT8", "parameters": at(0) });
            let body = json!({ "inputs": [input], "outputs": [{ "name": "y", "parameters": at(offset) }] });
            post_of(INFER, "", body.to_string().as_bytes())
        };
        assert_eq!(ask(&mut stream, &bearer(&register, ONE)).await.status, 200);
        for other in [OTHER, INFERS] {
            let heard = ask(&mut stream, &bearer(&infer(4), other)).await;
            assert!(
                heard.status == 404 && heard.json()["error"].as_str().unwrap().contains("region: 'r'"),
                "{heard:?}"
            );
        }
        let status = get_of("/v2/systemsharedmemory/status");
        assert_eq!(ask(&mut stream, &bearer(&status, OTHER)).await.json(), json!([]));
        let unregister = post_of("/v2/systemsharedmemory/unregister", "", b"");
        assert_eq!(ask(&mut stream, &bearer(&unregister, OTHER)).await.status, 200);
        assert_eq!(ask(&mut stream, &bearer(&unregister, INFERS)).await.status, 403);

        assert_eq!(ask(&mut stream, &bearer(&status, ONE)).await.json()[0]["name"], "r", "it is still there");
        let heard = ask(&mut stream, &bearer(&infer(4), ONE)).await;
        assert_eq!(heard.status, 200, "{heard:?}");
        assert_eq!(std::fs::read(folder.path().join("shm")).unwrap(), [1, 2, 3, 4, 2, 4, 6, 8]);
        // Two clients may have regions of the same name.
        assert_eq!(ask(&mut stream, &bearer(&register, OTHER)).await.status, 200);
    });
}
