//! Products that share their input.

use proptest::prelude::*;

use super::*;

/// What is done with one product.
#[derive(Debug, Clone)]
struct Branch {
    columns: usize,
    has_bias: bool,
    /// Of all columns, or of each.
    scale: Option<bool>,
    activation: Option<&'static str>,
}

fn branches() -> impl Strategy<Value = Vec<Branch>> {
    let columns = prop_oneof![8 => Just(8_usize), 4 => Just(24_usize), 1 => Just(5_usize)];
    let activation = prop_oneof![2 => Just(None), 1 => Just(Some("Relu")), 1 => Just(Some("Sigmoid"))];
    let branch = (columns, any::<bool>(), proptest::option::of(any::<bool>()), activation);
    let branch =
        branch.prop_map(|(columns, has_bias, scale, activation)| Branch { columns, has_bias, scale, activation });
    proptest::collection::vec(branch, 2..7)
}

/// Products of one tensor, each of which is multiplied by an input of its own in the end, so that nobody minds how it
/// lies; those of `outputs` alone are asked for.
fn net_of(branches: &[Branch], outputs: &[usize]) -> Net {
    let mut net = Net::new(29);
    let x = net.input("x", FLOAT, &[-1, 3, 12]);
    for (index, branch) in branches.iter().enumerate() {
        let columns = branch.columns;
        let weights = net.weight(&[12, columns], 0.5);
        let (bias, scales) = (net.weight(&[columns], 0.5), net.gain(&[columns]));
        if !outputs.contains(&index) {
            continue;
        }
        let mut y = net.node("MatMul", &[&x, &weights], &[]);
        if branch.has_bias {
            y = net.node("Add", &[&y, &bias], &[]);
        }
        if let Some(is_of_each) = branch.scale {
            let scale = if is_of_each { scales } else { net.scalar(0.25) };
            y = net.node("Mul", &[&y, &scale], &[]);
        }
        if let Some(activation) = branch.activation {
            y = net.node(activation, &[&y], &[]);
        }
        let other = net.input(&format!("z{index}"), FLOAT, &[-1, 3, columns as i64]);
        let y = net.node("Mul", &[&other, &y], &[]);
        net.output(&y);
    }
    net
}

/// Its outputs for a batch of 2 from these inputs, of which the first goes to all products.
fn outputs_of(net: &Net, (x, others): (&Tensor, &[Tensor]), precision: Precision) -> (Plan, Vec<Tensor>) {
    let (graph, batch) = net.graph();
    let lowered = lower(&graph, Some(&batch), &[2], precision).unwrap();
    let plan = lowered.plans.into_iter().next().unwrap();
    checks::check(&plan, &lowered.weights);
    let inputs: Vec<Tensor> = [x].into_iter().chain(others).cloned().collect();
    let (outputs, _) = interpreted(&plan, &lowered.weights, &inputs);
    (plan, outputs)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn each_of_them_is_to_the_bit_what_it_is_alone(branches in branches(), is_half in any::<bool>()) {
        let precision = if is_half { Precision::Fp16 } else { Precision::Fp32 };
        let all: Vec<usize> = (0..branches.len()).collect();
        let net = net_of(&branches, &all);
        let (graph, batch) = net.graph();
        let inputs = inputs_of(&graph, (&batch, 2), &mut Random(11), 1);
        let (plan, together) = outputs_of(&net, (&inputs[0], &inputs[1..]), precision);
        for (index, together) in together.iter().enumerate() {
            let other = std::slice::from_ref(&inputs[index + 1]);
            let (single, alone) = outputs_of(&net_of(&branches, &[index]), (&inputs[0], other), precision);
            prop_assert_eq!(counts(&single)[1], 1);
            prop_assert_eq!(together.as_bytes(), alone[0].as_bytes(), "{}\n{}", index, listed(&plan));
        }
        let expected = computed(&graph, (&batch, 2), &inputs).unwrap();
        let limit = if is_half { 2e-2 } else { 1e-5 };
        for (found, expected) in together.iter().zip(&expected) {
            prop_assert!(distance(found, expected) <= limit, "{found:?}\n{expected:?}");
        }
    }
}

/// How many products a net of these has.
fn products(branches: &[Branch]) -> usize {
    let all: Vec<usize> = (0..branches.len()).collect();
    counts(&agrees(&net_of(branches, &all))[0])[1]
}

#[test]
fn those_that_do_the_same_are_one() {
    let plain = Branch { columns: 16, has_bias: false, scale: None, activation: None };
    let biased = Branch { has_bias: true, columns: 8, ..plain.clone() };
    let gate = Branch { activation: Some("Sigmoid"), ..plain.clone() };
    let rectified = Branch { activation: Some("Relu"), ..plain.clone() };
    let odd = Branch { columns: 6, ..plain.clone() };
    assert_eq!(products(&[plain.clone(), biased.clone(), gate]), 1);
    assert_eq!(products(&[rectified.clone(), rectified.clone()]), 1);
    assert_eq!(products(&[plain.clone(), biased, rectified]), 2, "an activation is of a whole product");
    assert_eq!(products(&[plain.clone(), odd]), 2, "columns begin where vectors may");
    assert_eq!(products(&vec![plain; 6]), 2, "what is made together is kept together");
}
