use super::*;

fn args(op: Op, bytes: u32, iters: u64) -> Args {
    Args { arm: ArmName::Soft, path: LocalPath::Ring, op, bytes, iters, fault: None, json: true }
}

#[test]
fn every_operation_moves_its_object() {
    for op in [Op::Send, Op::Write, Op::Read, Op::Pingpong] {
        for bytes in [1, 8, 4096, 150 * 1024] {
            // `measure` itself compares the bytes at both ends.
            let result = measure(&args(op, bytes, 40)).unwrap();
            for figures in [result.figures, result.over_udp.unwrap(), result.raw_udp, result.raw_tcp] {
                let Figures { latency_us, gbps } = figures;
                assert!(latency_us.p50 > 0.0 && latency_us.p50 <= latency_us.max && gbps > 0.0, "{op:?} {bytes}");
            }
        }
    }
}

#[test]
fn the_json_has_the_documented_keys() {
    let json = serde_json::to_value(measure(&args(Op::Read, 8, 3)).unwrap()).unwrap();
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&json),
        ["arm", "bytes", "gbps", "iters", "latency_us", "op", "over_udp", "path", "raw_tcp", "raw_udp"]
    );
    assert_eq!(keys(&json["raw_udp"]), ["gbps", "latency_us"]);
    assert_eq!(keys(&json["latency_us"]), ["max", "p50", "p99", "p999"]);
    assert_eq!((&json["arm"], &json["op"]), (&"soft".into(), &"read".into()));
}

#[test]
fn faults_are_compared_with_none() {
    let fault = Some("loss=0.05".parse().unwrap());
    let result = measure(&Args { fault, ..args(Op::Read, 20_000, 200) }).unwrap();
    assert!(result.without_fault.is_some());
    assert_eq!(result.table().lines().count(), 5, "{}", result.table());
}

/// Answers overtake acknowledgements that are lost, and then the queue of sends was once found full.
#[test]
fn a_ping_pong_outlasts_lost_acknowledgements() {
    let fault = Some("loss=0.02".parse().unwrap());
    let result = measure(&Args { fault, ..args(Op::Pingpong, 64, 2000) }).unwrap();
    assert!(result.without_fault.is_some());
}

#[test]
fn bad_flags_say_what_is_expected() {
    let error = run(&args(Op::Read, 0, 1)).unwrap_err().to_string();
    assert_eq!(error, "--bytes: expected a number above 0 and at most 8388608, found 0");
    let arm = "verbs:nonesuch0".parse().unwrap();
    let error = run(&Args { arm, ..args(Op::Read, 8, 1) }).unwrap_err().to_string();
    assert!(error.starts_with("--arm verbs: arm verbs:nonesuch0: "), "{error}");
}
