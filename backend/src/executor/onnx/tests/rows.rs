//! Batches of rows that influence each other, and of rows that do not: each row is answered as it is alone.

use super::*;
use crate::executor::rows::why_apart;

const WIDTH: usize = 3;

/// What is found of a model of one input and one output, and whether three of its rows are then answered as each is
/// alone.
fn judge(nodes: Vec<NodeProto>) -> Result<(Option<String>, bool), String> {
    let shape: &[i64] = &[-1, WIDTH as i64];
    let loaded = model("max_batch_size: 4", &[("x", FP32, shape)], nodes, &[("y", FP32, shape)])?;
    let sample = vec![0; WIDTH * 4];
    let model = &loaded.source.model;
    let why = why_apart(model, &sample, &mut |inputs, outputs| loaded.run_once(inputs, outputs));
    if why.is_some() {
        loaded.run_apart();
    }
    let numbers = [0.5, -2.0, 7.0, 1.0, 0.0, -1.0, 30.0, -4.0, 0.25];
    let together = run(&loaded, &numbers, 9 * 4);
    let alone: Vec<u8> = numbers.chunks(WIDTH).flat_map(|row| run(&loaded, row, WIDTH * 4)).collect();
    let near = |(found, alone): (&[u8; 4], &[u8; 4])| {
        let [found, alone] = [found, alone].map(|bytes| f32::from_le_bytes(*bytes));
        found == alone || (found - alone).abs() <= 1e-5 + 1e-4 * alone.abs()
    };
    let are_near = together.as_chunks().0.iter().zip(alone.as_chunks().0).all(near);
    Ok((why, are_near))
}

fn ints(name: &str, ints: &[i64]) -> AttributeProto {
    AttributeProto { name: name.into(), r#type: INTS, ints: ints.to_vec(), ..AttributeProto::default() }
}

fn reduced(operator: &str, axes: &[AttributeProto]) -> Vec<NodeProto> {
    let reduce = NodeProto { attribute: axes.to_vec(), ..node(operator, &["x"], "of_all", &[]) };
    vec![reduce, node("Sub", &["x", "of_all"], "y", &[])]
}

#[test]
fn rows_that_influence_each_other_are_answered_as_each_is_alone() {
    let together = [
        ("norm", reduced("ReduceMean", &[ints("axes", &[0])])),
        ("largest", reduced("ReduceMax", &[])),
        ("softmax", vec![node("Softmax", &["x"], "y", &[("axis", 0)])]),
        (
            "size",
            vec![
                node("Size", &["x"], "size", &[]),
                node("Cast", &["size"], "number", &[("to", FP32.into())]),
                node("Exp", &["x"], "positive", &[]),
                node("Div", &["positive", "number"], "y", &[]),
            ],
        ),
    ];
    for (name, nodes) in together {
        let found = judge(nodes);
        assert!(matches!(&found, Ok((Some(_), true))), "{name}: {found:?}");
    }
}

#[test]
fn rows_of_their_own_run_together() {
    let apart = [
        ("norm", reduced("ReduceMean", &[ints("axes", &[1])])),
        ("softmax", vec![node("Softmax", &["x"], "y", &[("axis", 1)])]),
        ("numbers", vec![node("Exp", &["x"], "positive", &[]), node("Log", &["positive"], "y", &[])]),
    ];
    for (name, nodes) in apart {
        assert_eq!(judge(nodes), Ok((None, true)), "{name}");
    }
}

/// By whoever has them.
#[test]
fn scales_of_a_whole_batch_and_random_numbers_are_found_out() {
    if onnxruntime::tests::instead().is_none() {
        return;
    }
    let quantise = NodeProto {
        output: ["steps", "scale", "zero"].map(String::from).to_vec(),
        ..node("DynamicQuantizeLinear", &["x"], "steps", &[])
    };
    let scaled = vec![quantise, node("DequantizeLinear", &["steps", "scale", "zero"], "y", &[])];
    assert_eq!(judge(scaled), Ok((Some("they influence each other".to_owned()), true)));
    let random = vec![node("RandomNormalLike", &["x"], "random", &[]), node("Add", &["x", "random"], "y", &[])];
    let found = judge(random).unwrap().0;
    assert_eq!(found.as_deref(), Some("the same input is answered otherwise when it is run again"));
}
