//! Traces as OTLP has them, in JSON (OpenTelemetry Protocol 1.x, "JSON Protobuf Encoding": ids in hexadecimal digits,
//! 64-bit numbers as text, enumerations as numbers).

use serde_json::{Value, json};

use super::{Period, Trace};

/// `SPAN_KIND_INTERNAL` and `SPAN_KIND_SERVER`.
const INTERNAL: u32 = 1;
const SERVER: u32 = 2;
/// `STATUS_CODE_ERROR`.
const ERROR: u32 = 2;

/// The body of an `ExportTraceServiceRequest`. `random` yields numbers for ids.
pub fn encode(traces: &[Trace], mut random: impl FnMut() -> u64) -> Vec<u8> {
    let spans: Vec<Value> = traces.iter().flat_map(|trace| spans(trace, &mut random)).collect();
    let version = env!("CARGO_PKG_VERSION");
    let request = json!({ "resourceSpans": [{
        "resource": { "attributes": [text("service.name", "downbeat"), text("service.version", version)] },
        "scopeSpans": [{ "scope": { "name": "downbeat.frontend", "version": version }, "spans": spans }],
    }] });
    request.to_string().into_bytes()
}

/// The span of the request and those of its stages.
fn spans(trace: &Trace, random: &mut impl FnMut() -> u64) -> Vec<Value> {
    let mut id = || random().max(1);
    let trace_id = match &trace.context {
        Some(context) => context.trace,
        None => u128::from(id()) << 64 | u128::from(id()),
    };
    let root = id();
    let span = |id: u64, parent: Option<u64>, name: &str, kind: u32, period: Period| {
        let state = trace.context.as_ref().map_or("", |context| &context.state);
        let mut span = json!({
            "traceId": format!("{trace_id:032x}"),
            "spanId": format!("{id:016x}"),
            "traceState": state,
            // The trace is sampled.
            "flags": 1,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": period.from_unix_ns.to_string(),
            "endTimeUnixNano": period.to_unix_ns.to_string(),
        });
        if let Some(parent) = parent {
            span["parentSpanId"] = format!("{parent:016x}").into();
        }
        span
    };
    let caller = trace.context.as_ref().map(|context| context.parent);
    let mut request = span(root, caller, &format!("infer {}", trace.model), SERVER, trace.period);
    let mut attributes = vec![text("downbeat.model", &trace.model)];
    if let Some(ran) = &trace.ran {
        attributes.push(number("downbeat.batch_size", ran.batch_size.into()));
        attributes.push(number("downbeat.backend", ran.backend.into()));
        attributes.push(number("downbeat.gpu", ran.gpu.into()));
    }
    if let Some((message, reason)) = &trace.error {
        attributes.extend(reason.map(|reason| text("downbeat.drop_reason", reason)));
        request["status"] = json!({ "code": ERROR, "message": message });
    }
    request["attributes"] = attributes.into();
    let mut spans = vec![request];
    for (stage, period) in &trace.stages {
        spans.push(span(id(), Some(root), stage, INTERNAL, *period));
    }
    spans
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn number(key: &str, value: i64) -> Value {
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Ran, TraceContext};

    #[test]
    fn a_request_is_a_span_under_its_callers_and_its_stages_are_under_it() {
        let period = |from_unix_ns, to_unix_ns| Period { from_unix_ns, to_unix_ns };
        let trace = Trace {
            context: Some(TraceContext { trace: 0xabc, parent: 0xdef, sampled: true, state: "a=b".into() }),
            model: "digits".into(),
            period: period(1_700_000_000_000_000_000, 1_700_000_000_005_000_000),
            stages: vec![("queue", period(1_700_000_000_001_000_000, 1_700_000_000_002_000_000))],
            ran: Some(Ran { batch_size: 3, backend: 6, gpu: 2 }),
            error: None,
        };
        let dropped = Trace {
            context: None,
            ran: None,
            stages: Vec::new(),
            error: Some(("too late".into(), Some("deadline"))),
            ..trace.clone()
        };
        let mut next = 0;
        let body = encode(&[trace, dropped], || {
            next += 1;
            next
        });
        let body: Value = serde_json::from_slice(&body).unwrap();
        let of_resource = &body["resourceSpans"][0];
        assert_eq!(of_resource["resource"]["attributes"][0]["value"]["stringValue"], "downbeat");
        let spans = of_resource["scopeSpans"][0]["spans"].as_array().unwrap();
        let [request, queue, dropped] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!(request["traceId"], "00000000000000000000000000000abc");
        assert_eq!(
            (&request["parentSpanId"], &request["spanId"]),
            (&json!("0000000000000def"), &json!("0000000000000001"))
        );
        assert_eq!((&request["kind"], &request["traceState"]), (&json!(2), &json!("a=b")));
        assert_eq!(request["startTimeUnixNano"], "1700000000000000000");
        assert_eq!(request["attributes"][1], json!({ "key": "downbeat.batch_size", "value": { "intValue": "3" } }));
        assert_eq!((&queue["name"], &queue["parentSpanId"]), (&json!("queue"), &request["spanId"]));
        assert_eq!(
            (&dropped["traceId"], dropped.get("parentSpanId")),
            (&json!("00000000000000030000000000000004"), None)
        );
        assert_eq!(dropped["status"], json!({ "code": 2, "message": "too late" }));
        assert_eq!(dropped["attributes"][1]["value"]["stringValue"], "deadline");
    }
}
