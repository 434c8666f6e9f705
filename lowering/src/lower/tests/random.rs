//! Graphs that nobody would write, so that fusions meet each other in every order.

use proptest::prelude::*;

use super::*;

/// Tensors of a net, with their shapes but for the batch.
struct Pool {
    net: Net,
    tensors: Vec<(String, Vec<usize>)>,
}

impl Pool {
    fn new(seed: u64) -> Self {
        let mut net = Net::new(seed);
        // Seeds that are next to each other begin alike.
        for _ in 0..4 {
            net.random.unit();
        }
        let mut tensors = Vec::new();
        for (index, shape) in [vec![4, 3, 4], vec![6, 4], vec![4, 4, 3]].into_iter().enumerate() {
            let lengths: Vec<i64> = [-1].into_iter().chain(shape.iter().map(|&length| length as i64)).collect();
            tensors.push((net.input(&format!("x{index}"), FLOAT, &lengths), shape));
        }
        Self { net, tensors }
    }

    fn below(&mut self, end: usize) -> usize {
        self.net.random.below(end)
    }

    fn pick(&mut self) -> (String, Vec<usize>) {
        // Most often one of the last.
        let back = self.below(4).min(self.below(8)).min(self.tensors.len() - 1);
        self.tensors[self.tensors.len() - 1 - back].clone()
    }

    fn push(&mut self, name: String, shape: &[usize]) {
        self.tensors.push((name, shape.to_vec()));
    }

    fn grow(&mut self) {
        let (x, shape) = self.pick();
        match self.below(13) {
            0 => {
                let operators = ["Tanh", "Sigmoid", "Relu", "Abs", "Neg", "Erf"];
                let operator = operators[self.below(operators.len())];
                let y = self.net.node(operator, &[&x], &[]);
                self.push(y, &shape);
            }
            1 | 2 => self.binary(&x, &shape),
            3 => self.transpose(&x, &shape),
            4 => self.reshape(&x, &shape),
            5 => self.slice(&x, &shape),
            6 => self.concat(&x, &shape),
            7 | 8 => self.product(&x, &shape),
            9 => {
                let axis = 1 + self.below(shape.len());
                let y = self.net.node("Softmax", &[&x], &[("axis", Int(axis as i64))]);
                self.push(y, &shape);
            }
            10 => self.normal(&x, &shape),
            11 => self.convolution(&x, &shape),
            _ => {
                let zero = self.net.scalar(0.1);
                let is_less = self.net.node("Less", &[&x, &zero], &[]);
                let half = self.net.weight(&shape, 1.0);
                let y = self.net.node("Where", &[&is_less, &x, &half], &[]);
                self.push(y, &shape);
            }
        }
    }

    fn binary(&mut self, x: &str, shape: &[usize]) {
        let operator = ["Add", "Mul", "Sub", "Max", "Add"][self.below(5)];
        let alike: Vec<_> = self.tensors.iter().filter(|(_, other)| other == shape).cloned().collect();
        let other = match self.below(4) {
            0 => {
                let shape: Vec<usize> =
                    shape.iter().map(|&length| if self.below(2) == 0 { 1 } else { length }).collect();
                self.net.weight(&shape, 1.0)
            }
            1 => self.net.scalar(0.7),
            2 => {
                let axis = 1 + self.below(shape.len()) as i64;
                self.net.node("ReduceMean", &[x], &[("axes", Ints(&[axis]))])
            }
            _ => alike[self.below(alike.len())].0.clone(),
        };
        let operands = if self.below(2) == 0 { [x, &other] } else { [&other, x] };
        let y = self.net.node(operator, &operands, &[]);
        self.push(y, shape);
    }

    fn transpose(&mut self, x: &str, shape: &[usize]) {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        for at in (1..order.len()).rev() {
            let with = self.below(at + 1);
            order.swap(at, with);
        }
        let permutation: Vec<i64> = [0].into_iter().chain(order.iter().map(|&dim| dim as i64 + 1)).collect();
        let y = self.net.node("Transpose", &[x], &[("perm", Ints(&permutation))]);
        self.push(y, &order.iter().map(|&dim| shape[dim]).collect::<Vec<_>>());
    }

    fn reshape(&mut self, x: &str, shape: &[usize]) {
        let elements: usize = shape.iter().product();
        let mut new = Vec::new();
        let mut rest = elements;
        for _ in 0..1 + self.below(2) {
            let divisors: Vec<usize> = (1..=rest).filter(|divisor| rest.is_multiple_of(*divisor)).collect();
            new.push(divisors[self.below(divisors.len())]);
            rest /= new[new.len() - 1];
        }
        new.push(rest);
        let lengths: Vec<i64> = [0].into_iter().chain(new.iter().map(|&length| length as i64)).collect();
        let lengths = self.net.ints(&[lengths.len()], &lengths);
        let y = self.net.node("Reshape", &[x, &lengths], &[]);
        self.push(y, &new);
    }

    fn slice(&mut self, x: &str, shape: &[usize]) {
        let dim = self.below(shape.len());
        let start = self.below(shape[dim]);
        let end = start + 1 + self.below(shape[dim] - start);
        let vectors = [start, end, dim + 1].map(|value| self.net.ints(&[1], &[value as i64]));
        let y = self.net.node("Slice", &[x, &vectors[0], &vectors[1], &vectors[2]], &[]);
        let mut shape = shape.to_vec();
        shape[dim] = end - start;
        self.push(y, &shape);
    }

    fn concat(&mut self, x: &str, shape: &[usize]) {
        if shape.iter().product::<usize>() > 400 {
            return;
        }
        let alike: Vec<_> = self.tensors.iter().filter(|(_, other)| other == shape).cloned().collect();
        let other = alike[self.below(alike.len())].0.clone();
        let dim = self.below(shape.len());
        let y = self.net.node("Concat", &[&other, x], &[("axis", Int(dim as i64 + 1))]);
        let mut shape = shape.to_vec();
        shape[dim] *= 2;
        self.push(y, &shape);
    }

    fn product(&mut self, x: &str, shape: &[usize]) {
        if self.below(3) > 0 || shape.len() < 2 {
            // Those of one tensor become one where their columns are multiples of eight.
            let columns = [1 + self.below(6), 8, 16][self.below(3)];
            for _ in 0..[1, 1, 2, 3][self.below(4)] {
                self.weighted(x, shape, columns);
            }
            return;
        }
        // With itself, as attention does.
        let rank = shape.len() as i64 + 1;
        let mut permutation: Vec<i64> = (0..rank).collect();
        permutation.swap(rank as usize - 1, rank as usize - 2);
        let turned = self.net.node("Transpose", &[x], &[("perm", Ints(&permutation))]);
        let scores = self.net.node("MatMul", &[x, &turned], &[]);
        let weights = self.net.node("Softmax", &[&scores], &[("axis", Int(-1))]);
        let y = self.net.node("MatMul", &[&weights, x], &[]);
        self.push(y, shape);
    }

    fn weighted(&mut self, x: &str, shape: &[usize], columns: usize) {
        let weights = self.net.weight(&[shape[shape.len() - 1], columns], 0.5);
        let mut y = self.net.node("MatMul", &[x, &weights], &[]);
        if self.below(2) == 0 {
            let bias = self.net.weight(&[columns], 1.0);
            y = self.net.node("Add", &[&y, &bias], &[]);
        }
        let mut shape = shape.to_vec();
        *shape.last_mut().unwrap() = columns;
        self.push(y, &shape);
    }

    fn normal(&mut self, x: &str, shape: &[usize]) {
        let columns = shape[shape.len() - 1];
        let (scale, shift) = (self.net.gain(&[columns]), self.net.weight(&[columns], 1.0));
        let y = self.net.node("LayerNormalization", &[x, &scale, &shift], &[("epsilon", Float(0.01))]);
        self.push(y, shape);
    }

    fn convolution(&mut self, x: &str, shape: &[usize]) {
        let &[c, height, width] = shape else { return };
        let (k, size) = (1 + self.below(5), 1 + 2 * self.below(2));
        let weights = self.net.weight(&[k, c, size, size], 0.4);
        let stride = 1 + self.below(2);
        let pad = (size / 2) as i64;
        let attributes = [("pads", Ints(&[pad, pad, pad, pad])), ("strides", Ints(&[stride as i64, stride as i64]))];
        let y = self.net.node("Conv", &[x, &weights], &attributes);
        self.push(y, &[k, (height - 1) / stride + 1, (width - 1) / stride + 1]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_graph_computes_what_tract_does(seed in any::<u64>(), nodes in 3_usize..16) {
        let mut pool = Pool::new(seed);
        (0..nodes).for_each(|_| pool.grow());
        for back in 1..=2 {
            // An output of its own each, and none that is an input.
            let (name, _) = pool.tensors[pool.tensors.len() - back].clone();
            let output = pool.net.node("Tanh", &[&name], &[]);
            pool.net.output(&output);
        }
        // tract (0.23) itself fails at a few.
        let Ok((graph, batch)) = pool.net.try_graph() else { return Ok(()) };
        for size in [1, 3] {
            let inputs = inputs_of(&graph, (&batch, size), &mut Random(7), 5);
            prop_assume!(computed(&graph, (&batch, size), &inputs).is_ok());
        }
        // Half precision is judged on models that keep numbers small.
        agrees_within(&pool.net, 1e-3, f32::INFINITY);
    }
}
