//! Requests for graphs in the simulated fabric: each is a [`Run`] as frontends drive it, whose steps are requests of
//! the core like others.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ensembles::run::{Action, Failure, Run, StepTimes};
use frontend::{
    InferError,
    core::Core,
    tasks::{CheckedRequest, RequestId},
};
use proto::{Application, Span, Timestamp, scheduler_to_frontend::DropReason};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::{Ensemble, EnsembleStep, emulated::digest};

use super::{ENDS_LATE, arena};
use crate::{
    env::Env,
    models::{Dynamic, MODELS},
    node::Node,
    oracle::Violation,
};

/// Which steps each graph has: the model's place among [`MODELS`], and the steps whose answers it takes; of the request
/// itself if there are none. The last step's answer is the graph's.
const GRAPHS: [&[(usize, &[usize])]; 2] = [&[(0, &[]), (1, &[0])], &[(0, &[]), (1, &[0]), (0, &[0]), (1, &[1, 2])]];
/// Of a frontend's requests, in worlds that have graphs.
const GRAPHS_PERCENT: u32 = 25;
const INPUT_BYTES: usize = 64;
/// Sets what graphs draw apart from all else of a seed.
const DRAWN: u64 = 0x67_7261_7068;

/// A frontend's requests for graphs. They draw from randomness of their own, and half of the worlds have none.
pub(super) struct Graphs {
    graphs: [Arc<Ensemble>; GRAPHS.len()],
    ways: BTreeMap<u64, Way>,
    next: u64,
    /// Which step of which way a request of the core's is.
    asked: BTreeMap<RequestId, (u64, usize)>,
    /// Those that nobody waits for, whose end may be on its way.
    cancelled: BTreeSet<RequestId>,
    percent: u32,
    random: ChaCha8Rng,
}

/// A request's way through its graph.
struct Way {
    graph: usize,
    run: Run<Vec<u8>, InferError>,
    expected: Vec<u8>,
    /// On the frontend's clock.
    arrived: Timestamp,
    /// Real time, after which it must have ended.
    ends_by: Timestamp,
}

/// How a request for a graph has ended.
pub(super) type Ended = Result<(), InferError>;

impl Graphs {
    pub(super) fn new(seed: u64, node: Node) -> Self {
        let mut world = ChaCha8Rng::seed_from_u64(seed ^ DRAWN);
        let percent = if world.random_bool(0.5) { GRAPHS_PERCENT } else { 0 };
        world.set_stream(1 + node.0 as u64);
        Self {
            graphs: GRAPHS.map(|steps| Arc::new(ensemble(steps))),
            ways: BTreeMap::new(),
            next: 0,
            asked: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            percent,
            random: world,
        }
    }

    /// Whether the next request is for a graph.
    pub(super) fn is_next(&mut self) -> bool {
        self.percent > 0 && self.random.random_ratio(self.percent, 100)
    }

    /// A client asks for a graph. It may not wait for its end.
    pub(super) fn request(&mut self, env: &mut Env, core: &mut Core, node: Node) -> Option<Ended> {
        let graph = self.random.random_range(0..GRAPHS.len());
        let mut input = vec![0; INPUT_BYTES];
        self.random.fill_bytes(&mut input);
        let slo = Span::from_millis(self.random.random_range(60..160));
        let expected = evaluated(env.dynamic, GRAPHS[graph], &input);
        let times = |(model, _): &(usize, &[usize])| {
            let index = core.models().find(MODELS[*model].0, None).expect("it is in the repository");
            let offer = core.models().get(index).offer;
            offer.map_or_else(StepTimes::default, |offer| StepTimes {
                least: offer.least_latency,
                batching: offer.batching,
            })
        };
        let times: Vec<StepTimes> = GRAPHS[graph].iter().map(times).collect();
        let arrived = env.local(node);
        let ensemble = Arc::clone(&self.graphs[graph]);
        let run = Run::new(ensemble, &times, arrived + slo, vec![Some(input)], vec![true]);
        let number = self.next;
        self.next += 1;
        self.ways.insert(number, Way { graph, run, expected, arrived, ends_by: env.now + slo + ENDS_LATE });
        env.trace(node, || format!("admits graph {graph} as {number} within {slo}"));
        self.drive(env, core, node, number)
    }

    /// A request of the core has ended. `None`, if it is no step's; otherwise how its graph has, if it has.
    pub(super) fn handle_reply(
        &mut self,
        env: &mut Env,
        (core, node): (&mut Core, Node),
        id: RequestId,
        result: Result<Vec<u8>, InferError>,
    ) -> Option<Option<Ended>> {
        if self.cancelled.remove(&id) {
            return Some(None);
        }
        let (number, step) = self.asked.remove(&id)?;
        let way = self.ways.get_mut(&number).expect("its steps are cancelled when it ends");
        way.run.handle_reply(step, result.map(|output| vec![output]));
        Some(self.drive(env, core, node, number))
    }

    /// Ends what is over, one a call.
    pub(super) fn handle_timeout(&mut self, env: &mut Env, core: &mut Core, node: Node) -> Option<Ended> {
        let now = env.local(node);
        let is_over = |way: &Way| way.run.poll_timeout().is_some_and(|at| at <= now);
        let number = self.ways.iter().find(|(_, way)| is_over(way)).map(|(number, _)| *number)?;
        self.ways.get_mut(&number).expect("just found").run.handle_timeout(now);
        self.drive(env, core, node, number)
    }

    /// When [`Self::handle_timeout`] must be called, on the frontend's clock.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.ways.values().filter_map(|way| way.run.poll_timeout()).min()
    }

    /// What is open although it is too late for that.
    pub(super) fn overdue(&self, now: Timestamp) -> Option<u64> {
        self.ways.iter().find(|(_, way)| now > way.ends_by).map(|(number, _)| *number)
    }

    /// Requests that have not ended, and steps that are under way.
    pub(super) fn open(&self) -> (usize, usize) {
        (self.ways.len(), self.asked.len())
    }

    /// The process ends.
    pub(super) fn clear(&mut self) {
        self.ways.clear();
        self.asked.clear();
        self.cancelled.clear();
    }

    /// Does what a run asks for; yields how it has ended, if it has.
    fn drive(&mut self, env: &mut Env, core: &mut Core, node: Node, number: u64) -> Option<Ended> {
        let way = self.ways.get_mut(&number)?;
        while let Some(action) = way.run.poll_action(env.local(node)) {
            match action {
                Action::Submit { step, inputs, until } => {
                    let (model, _) = GRAPHS[way.graph][step];
                    let tensors: Vec<Vec<u8>> = inputs.into_iter().flatten().collect();
                    let input = input_of(env.dynamic, model, &tensors);
                    let now = env.local(node);
                    let request = CheckedRequest {
                        model: core.models().find(MODELS[model].0, None).expect("it is in the repository"),
                        rows: 1,
                        inputs: vec![input.into()],
                        slo: until - way.arrived,
                        waited: now - way.arrived,
                        priority: 0,
                        application: Application(0),
                        client: None,
                    };
                    match core.handle_request(now, &request, &arena(env, node)) {
                        Ok(id) => {
                            env.trace(node, || format!("admits {id:?}: step {step} of graph request {number}"));
                            self.asked.insert(id, (number, step));
                        }
                        Err(error) => way.run.handle_reply(step, Err(error)),
                    }
                }
                Action::Cancel { step } => {
                    let under_way = self.asked.iter().find(|(_, of)| **of == (number, step)).map(|(id, _)| *id);
                    let id = under_way.expect("it was submitted, and has not ended");
                    self.asked.remove(&id);
                    self.cancelled.insert(id);
                    core.handle_cancel(id);
                }
                Action::Finish(result) => {
                    let way = self.ways.remove(&number).expect("it was there");
                    if self.asked.values().any(|(other, _)| *other == number) {
                        let text = format!("graph request {number} has ended, and one of its steps has not");
                        env.oracle.report(Violation::Ends(text));
                    }
                    env.trace(node, || format!("ends graph request {number}: {}", result.is_ok()));
                    return Some(match result {
                        Ok(outputs) => {
                            if outputs != [Some(way.expected)] {
                                let text = format!("graph request {number} was answered with another's output");
                                env.oracle.report(Violation::Slot(text));
                            }
                            Ok(())
                        }
                        Err(Failure::Step(_, error)) => Err(error),
                        Err(Failure::Deadline) => Err(DropReason::Deadline.into()),
                    });
                }
            }
        }
        None
    }
}

/// As the repository would have it: each step makes one tensor.
fn ensemble(steps: &[(usize, &[usize])]) -> Ensemble {
    let named = |tensor: usize| (tensor.to_string(), tensor);
    let step = |(at, (model, takes)): (usize, &(usize, &[usize]))| EnsembleStep {
        model: MODELS[*model].0.to_owned(),
        version: None,
        inputs: if takes.is_empty() { vec![named(0)] } else { takes.iter().map(|take| named(take + 1)).collect() },
        outputs: vec![named(at + 1)],
    };
    Ensemble {
        steps: steps.iter().enumerate().map(step).collect(),
        tensors: (0..=steps.len()).map(|tensor| tensor.to_string()).collect(),
        outputs: vec![steps.len()],
        selection: None,
        nested: None,
    }
}

/// What a model is given of these tensors: all of them, again and again until it is long enough.
fn input_of(dynamic: Dynamic, model: usize, tensors: &[Vec<u8>]) -> Vec<u8> {
    let (name, bytes) = MODELS[model];
    let mut input: Vec<u8> = tensors.concat().into_iter().cycle().take(bytes).collect();
    dynamic.mark(name, &mut input, 0);
    input
}

/// By the definition: the last of the tensors that the steps make, one after another.
fn evaluated(dynamic: Dynamic, steps: &[(usize, &[usize])], request: &[u8]) -> Vec<u8> {
    let mut made: Vec<Vec<u8>> = Vec::new();
    for (model, takes) in steps {
        let taken: Vec<Vec<u8>> = takes.iter().map(|take| made[*take].clone()).collect();
        let taken = if taken.is_empty() { vec![request.to_vec()] } else { taken };
        made.push(digest(&input_of(dynamic, *model, &taken)).map(u64::to_le_bytes).concat());
    }
    made.pop().expect("a graph has steps")
}
