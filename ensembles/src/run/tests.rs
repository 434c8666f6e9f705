use std::collections::BTreeSet;

use proptest::prelude::*;
use repository::EnsembleStep;

use super::*;

type Steps = Vec<(Vec<usize>, usize)>;

/// A graph of steps that take some tensors and make so many; of the tensors made, every third is an output.
fn graph(inputs: usize, steps: &Steps) -> Arc<Ensemble> {
    let mut made = inputs;
    let mut graph =
        Ensemble { steps: Vec::new(), tensors: Vec::new(), outputs: Vec::new(), selection: None, nested: None };
    for (takes, makes) in steps {
        let named = |tensor: usize| (tensor.to_string(), tensor);
        // Whatever is drawn, it was made before.
        let taken: BTreeSet<usize> = takes.iter().map(|take| take % made).collect();
        let (inputs, outputs) = (taken.into_iter().map(named).collect(), (made..made + makes).map(named).collect());
        made += makes;
        graph.steps.push(EnsembleStep { model: "m".to_owned(), version: None, inputs, outputs });
    }
    graph.tensors = (0..made).map(|tensor| tensor.to_string()).collect();
    graph.outputs = (inputs..made).filter(|tensor| tensor % 3 == 0 || *tensor == made - 1).collect();
    Arc::new(graph)
}

/// What a step makes of its inputs: any change of any of them shows.
fn computed(step: usize, inputs: &[Option<u64>], output: usize) -> u64 {
    let mix = |sum: u64, value: u64| (sum ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
    let of_inputs = inputs.iter().fold(step as u64 + 1, |sum, input| mix(sum, input.map_or(7, |input| input + 11)));
    mix(of_inputs, output as u64)
}

/// By the definition: a tensor is what its step makes of its inputs. Notes which steps that takes.
fn evaluate(graph: &Ensemble, given: &[Option<u64>], tensor: usize, needed: &mut BTreeSet<usize>) -> Option<u64> {
    let is_made = |step: &EnsembleStep| step.outputs.iter().position(|(_, to)| *to == tensor);
    let made = graph.steps.iter().enumerate().find_map(|(at, step)| Some((at, is_made(step)?)));
    let Some((step, output)) = made else { return given[tensor] };
    needed.insert(step);
    let inputs: Vec<_> =
        graph.steps[step].inputs.iter().map(|(_, from)| evaluate(graph, given, *from, needed)).collect();
    Some(computed(step, &inputs, output))
}

/// Steps, which tensors each takes and how many it makes.
fn steps() -> impl Strategy<Value = Steps> {
    let takes = proptest::collection::vec(0..40usize, 1..4);
    proptest::collection::vec((takes, 1..3usize), 1..9)
}

fn times((least, batching): (i64, i64)) -> StepTimes {
    StepTimes { least: Span(least), batching: Span(batching) }
}

/// A run and what is under way of it.
struct Driven {
    run: Run<u64, &'static str>,
    under_way: Vec<(usize, Vec<Option<u64>>)>,
    submitted: Vec<(usize, Timestamp, Timestamp)>,
    cancelled: Vec<usize>,
    finished: Option<Result<Vec<Option<u64>>, Failure<&'static str>>>,
}

impl Driven {
    fn new(
        graph: &Arc<Ensemble>,
        times: &[StepTimes],
        deadline: Timestamp,
        given: &[Option<u64>],
        wanted: &[bool],
    ) -> Self {
        let run = Run::new(Arc::clone(graph), times, deadline, given.to_vec(), wanted.to_vec());
        Self { run, under_way: vec![], submitted: vec![], cancelled: vec![], finished: None }
    }

    fn drain(&mut self, now: Timestamp) {
        while let Some(action) = self.run.poll_action(now) {
            assert!(self.finished.is_none(), "nothing follows the end");
            match action {
                Action::Submit { step, inputs, until } => {
                    self.submitted.push((step, now, until));
                    self.under_way.push((step, inputs));
                }
                Action::Cancel { step } => {
                    self.under_way.retain(|(other, _)| *other != step);
                    self.cancelled.push(step);
                }
                Action::Finish(result) => self.finished = Some(result),
            }
        }
        assert_eq!(self.finished.is_some(), self.under_way.is_empty(), "it goes on, or it has ended");
    }

    /// The step of this place among those under way answers.
    fn answer(&mut self, at: prop::sample::Index, graph: &Ensemble) {
        let (step, inputs) = self.under_way.remove(at.index(self.under_way.len()));
        let outputs = (0..graph.steps[step].outputs.len()).map(|output| computed(step, &inputs, output));
        self.run.handle_reply(step, Ok(outputs.collect()));
    }
}

/// What is drawn for a run: inputs, outputs that are wanted, and in which order steps end.
fn drawn() -> impl Strategy<Value = (Steps, Vec<Option<u64>>, Vec<bool>, Vec<prop::sample::Index>)> {
    let given = proptest::collection::vec(proptest::option::weighted(0.8, 0..1000u64), 1..3);
    let wanted = proptest::collection::vec(any::<bool>(), 20);
    (steps(), given, wanted, proptest::collection::vec(any::<prop::sample::Index>(), 20))
}

proptest! {
    /// In whatever order steps end: the outputs are those of the definition, exactly the steps that they take run, each
    /// once, and each as soon as all of its inputs are there.
    #[test]
    fn outputs_are_what_the_definition_says((steps, given, mut wanted, order) in drawn()) {
        let graph = graph(given.len(), &steps);
        wanted.truncate(graph.outputs.len());
        let mut needed = BTreeSet::new();
        let expected: Vec<Option<u64>> = graph.outputs.iter().zip(&wanted)
            .map(|(tensor, is_wanted)| is_wanted.then(|| evaluate(&graph, &given, *tensor, &mut needed)).flatten())
            .collect();
        let times = vec![StepTimes::default(); steps.len()];
        let mut driven = Driven::new(&graph, &times, Timestamp::NEVER, &given, &wanted);
        let mut made: BTreeSet<usize> = (0..given.len()).collect();
        driven.drain(Timestamp(0));
        for at in order {
            if driven.finished.is_some() { break; }
            // All that can be under way is.
            let is_ready = |step: usize| graph.steps[step].inputs.iter().all(|(_, from)| made.contains(from));
            let ready: BTreeSet<usize> = needed.iter().copied().filter(|step| is_ready(*step)).collect();
            prop_assert_eq!(driven.submitted.iter().map(|(step, ..)| *step).collect::<BTreeSet<_>>(), ready);
            let (step, _) = driven.under_way[at.index(driven.under_way.len())];
            driven.answer(at, &graph);
            made.extend(graph.steps[step].outputs.iter().map(|(_, to)| *to));
            driven.drain(Timestamp(0));
        }
        prop_assert_eq!(driven.finished, Some(Ok(expected)));
        prop_assert_eq!((driven.submitted.len(), driven.cancelled.len()), (needed.len(), 0), "each once");
    }

    /// Whichever step fails first, or if the deadline comes: it ends once, with that reason, all that is under way is
    /// cancelled, and what comes of it later counts for nothing.
    #[test]
    fn it_ends_once_and_leaves_nothing(
        (steps, given, _, order) in drawn(),
        fails_after in 0..9usize,
        by_timeout: bool,
    ) {
        let graph = graph(given.len(), &steps);
        let wanted = vec![true; graph.outputs.len()];
        let mut driven = Driven::new(&graph, &vec![times((1, 1)); steps.len()], Timestamp(100), &given, &wanted);
        driven.drain(Timestamp(0));
        for (turn, at) in order.into_iter().enumerate() {
            if driven.finished.is_some() { break; }
            if turn < fails_after {
                driven.answer(at, &graph);
                driven.drain(Timestamp(turn as i64));
                continue;
            }
            let step = driven.under_way[at.index(driven.under_way.len())].0;
            let mut under_way: BTreeSet<usize> = driven.under_way.iter().map(|(step, _)| *step).collect();
            let expected = if by_timeout {
                driven.run.handle_timeout(Timestamp(99));
                driven.drain(Timestamp(99));
                prop_assert!(driven.finished.is_none(), "it is not over yet");
                driven.run.handle_timeout(driven.run.poll_timeout().unwrap());
                Failure::Deadline
            } else {
                driven.under_way.retain(|(other, _)| *other != step);
                under_way.remove(&step);
                driven.run.handle_reply(step, Err("torn"));
                Failure::Step(step, "torn")
            };
            driven.drain(Timestamp(100));
            prop_assert_eq!(&driven.finished, &Some(Err(expected)));
            prop_assert_eq!(driven.cancelled.iter().copied().collect::<BTreeSet<_>>(), under_way);
            for step in 0..graph.steps.len() {
                driven.run.handle_reply(step, Ok(vec![0; 2]));
            }
            driven.run.handle_timeout(Timestamp(1000));
            prop_assert_eq!((driven.run.poll_timeout(), driven.run.poll_action(Timestamp(1000))), (None, None));
            break;
        }
        prop_assert!(driven.finished.is_some());
    }

    /// If each step takes all of its time, the whole is in time, and no step has less than its least latency while the
    /// objective is no shorter than the longest path; whoever ends a path has all that is left.
    #[test]
    fn shares_add_up_to_the_objective(
        (steps, given, _, _) in drawn(),
        drawn_times in proptest::collection::vec((1..50_000i64, 0..20_000i64), 9),
        slack in 0..200_000i64,
    ) {
        let graph = graph(given.len(), &steps);
        let wanted = vec![true; graph.outputs.len()];
        let step_times: Vec<StepTimes> = drawn_times.into_iter().take(steps.len()).map(times).collect();
        let longest = Driven::new(&graph, &step_times, Timestamp::NEVER, &given, &wanted).run.least();
        let deadline = Timestamp(longest.0 + slack);
        let mut driven = Driven::new(&graph, &step_times, deadline, &given, &wanted);
        let mut now = Timestamp(0);
        driven.drain(now);
        while driven.finished.is_none() {
            for (step, at, until) in &driven.submitted {
                prop_assert!(*until <= deadline && *until - *at >= step_times[*step].least, "{step} {step_times:?}");
            }
            let ends = |step: &usize| driven.submitted.iter().find(|(other, ..)| other == step).unwrap().2;
            // The next that is out of time.
            let ends = driven.under_way.iter().map(|(step, _)| ends(step));
            let (at, until) = ends.enumerate().min_by_key(|(_, at)| *at).unwrap();
            now = now.max(until);
            let (step, inputs) = driven.under_way.remove(at);
            let outputs = (0..graph.steps[step].outputs.len()).map(|output| computed(step, &inputs, output));
            driven.run.handle_reply(step, Ok(outputs.collect()));
            driven.drain(now);
        }
        prop_assert!(matches!(driven.finished, Some(Ok(_))) && now <= deadline);
    }
}

#[test]
fn what_a_step_does_not_use_is_the_next_ones() {
    let graph = graph(1, &vec![(vec![0], 1), (vec![1], 1)]);
    let ms = |least, batching| StepTimes { least: Span::from_millis(least), batching: Span::from_millis(batching) };
    let at = |ms| Timestamp(0) + Span::from_millis(ms);
    let mut driven = Driven::new(&graph, &[ms(10, 3), ms(30, 1)], at(80), &[Some(1)], &vec![true; graph.outputs.len()]);
    driven.drain(at(0));
    // A mean of 20 beside what batches gain, and one step follows: (3 + 20) 1.4 of (3 + 20) 1.4 + 1 + 20.
    let first = at(10) + Span((40e6 * 32.2 / 53.2) as i64);
    assert_eq!((driven.run.least(), driven.submitted[0]), (Span::from_millis(40), (0, at(0), first)));
    driven.run.handle_reply(0, Ok(vec![2]));
    driven.drain(at(5));
    assert_eq!(driven.submitted[1], (1, at(5), at(80)));
}
