//! Programs that ask other models while they run a batch: what they are answered, and what becomes of a call when the
//! program, or whom it asks, does something else than it should.

use std::sync::{Mutex, PoisonError};

use backend::calls::{Answered, Callee, Question, Tensor, UnderWay};
use repository::DataType;

use super::*;

/// What a program does that asks: `ask(id, model, bytes)` begins a call, `answer_of(id)` waits for it.
const CALLS: &str = r#"
def ask(id, model, data, **otherwise):
    tensor = dict({"name": "x", "datatype": "UINT8", "shape": [len(data)], "bytes": len(data)}, **otherwise)
    say({"call": {"id": id, "model": model, "inputs": [tensor]}})
    control.sendall(data)
answers = {}
def answer_of(id):
    while id not in answers:
        called = json.loads(lines.readline())["called"]
        answers[called["id"]] = called.get("failed") or lines.read(sum(found["bytes"] for found in called["outputs"]))
    return answers.pop(id)
def done(batch, data):
    memory[area["offset"]:area["offset"] + len(data)] = bytes(data)
    output = {"datatype": "UINT8", "shape": [len(data), 1], "offset": area["offset"], "bytes": len(data)}
    say({"done": {"id": batch["id"], "groups": [{"tasks": len(data), "outputs": [output]}]}})
def given(batch):
    return bytes(memory[:batch["groups"][0]["inputs"][0]["bytes"]])
say({"ready": {"protocol": 2}})
for number, line in enumerate(lines):
    said = json.loads(line)
    if "called" in said:
        lines.read(sum(found["bytes"] for found in said["called"].get("outputs", [])))
        continue
    batch = said["batch"]
    run(batch)
"#;

/// Answers when the test says so.
#[derive(Default)]
struct Desk {
    asked: Mutex<Vec<(Question, Answered)>>,
    withdrawn: Arc<Mutex<usize>>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a desk")
    }
}

struct Withdraws(Arc<Mutex<usize>>);

impl Drop for Withdraws {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += 1;
    }
}

impl Callee for Desk {
    fn ask(&self, question: Question, answered: Answered) -> UnderWay {
        self.asked.lock().unwrap().push((question, answered));
        Box::new(Withdraws(Arc::clone(&self.withdrawn)))
    }
}

impl Desk {
    /// The questions under way, once there are so many.
    fn wait_for(&self, count: usize) -> Vec<(Question, Answered)> {
        eventually("the questions", || self.asked.lock().unwrap().len() >= count);
        std::mem::take(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn withdrawn(&self) -> usize {
        *self.withdrawn.lock().unwrap()
    }
}

fn answer(data: Vec<u8>) -> Result<Vec<Tensor>, String> {
    let shape = vec![data.len()];
    Ok(vec![Tensor { name: "y".to_owned(), datatype: DataType::Uint8, shape, data: data.into() }])
}

/// A model whose program runs batches so, on a lane, and whom it asks.
fn asking(run: &str) -> (Odd, Arc<dyn Executor>, Arc<Desk>) {
    let mut odd = Odd::with(&format!("def run(batch):\n{run}\n{CALLS}"), "");
    let desk = Arc::new(Desk::default());
    odd.programs = odd.programs.asking(Arc::clone(&desk) as Arc<dyn Callee>);
    // Behind the one GPU that there is.
    let executor = backend::executor::load(&odd.model(), (&[1], &1.into()), &OnnxRuntime::default(), &odd.programs);
    let executor = executor.unwrap();
    (odd, executor, desk)
}

#[test]
fn several_calls_are_under_way_and_answered_in_any_order() {
    let run = "    for at, byte in enumerate(given(batch)): ask(at, 'twice', bytes([byte]) * 3)\n    \
               done(batch, [answer_of(at)[0] for at in range(len(given(batch)))])";
    let (_odd, executor, desk) = asking(run);
    for _ in 0..2 {
        thread::scope(|scope| {
            let batch = scope.spawn(|| run_on(1, &*executor, &[1, 2, 3]));
            let asked = desk.wait_for(3);
            for (question, answered) in asked.into_iter().rev() {
                let [Tensor { name, datatype, shape, data }] = &question.inputs[..] else { panic!("{question:?}") };
                assert_eq!((&*question.model, &question.version, question.objective), ("twice", &None, None));
                assert_eq!((&**name, *datatype, &shape[..]), ("x", DataType::Uint8, &[3][..]));
                answered(answer(data.iter().map(|byte| 2 * byte).collect()));
            }
            assert_eq!(batch.join().unwrap(), Ok(vec![2, 4, 6]));
        });
    }
    assert_eq!(desk.withdrawn(), 6, "nothing is held afterwards");
}

#[test]
fn large_tensors_go_both_ways_beside_each_other() {
    let run = "    for at in range(4): ask(at, 'same', bytes([at]) * 3_000_000)\n    \
               done(batch, [sum(answer_of(at)) % 251 for at in range(4)])";
    let (_odd, executor, desk) = asking(run);
    thread::scope(|scope| {
        let batch = scope.spawn(|| run_on(1, &*executor, &[0; 4]));
        // The first is answered while the others are yet to be said.
        while !batch.is_finished() {
            for (question, answered) in std::mem::take(&mut *desk.asked.lock().unwrap()) {
                answered(answer(question.inputs[0].data.to_vec()));
            }
            thread::yield_now();
        }
        let expected = (0..4u64).map(|at| (at * 3_000_000 % 251) as u8).collect();
        assert_eq!(batch.join().unwrap(), Ok(expected));
    });
}

#[test]
fn what_cannot_be_asked_is_told_in_words() {
    let tells = |call: &str, expected: &str| {
        let run = format!(
            "    {call}\n    text = answer_of(7)\n    \
             say({{'failed': {{'id': batch['id'], 'reason': text if isinstance(text, str) else 'answered'}}}})"
        );
        let (_odd, executor, desk) = asking(&run);
        let found = run_on(1, &*executor, &[1]).unwrap_err();
        assert!(found.contains(expected), "found `{found}`, expected `{expected}`");
        assert!(desk.asked.lock().unwrap().is_empty());
        // It can go on.
        assert!(executor.is_up());
    };
    tells("ask(7, 'odd', b'x')", "model odd calls odd, which waits for it: found a cycle, expected none");
    tells("ask(7, 'other', b'x', datatype='FLOAT')", "input x: found type FLOAT, expected one of the protocol's");
    let (odd, tried, desk) = asking("    ask(7, 'other', b'x')\n    done(batch, [len(answer_of(7))])");
    assert_eq!(run_on(1, &*odd.load().unwrap(), &[1]).unwrap().len(), 1, "in a GPU's turn it is told why not");
    let mut output = [0];
    tried.execute(&[1], &mut output).unwrap();
    assert_eq!(usize::from(output[0]), "it is only tried".len());
    assert!(desk.asked.lock().unwrap().is_empty());
}

#[test]
fn a_call_ends_with_the_batch_that_it_belongs_to() {
    // The second batch is answered once the first one's call has been withdrawn.
    let run = "    ask(batch['id'], 'other', b'abc')\n    done(batch, given(batch))";
    let (_odd, executor, desk) = asking(run);
    assert_eq!(run_on(1, &*executor, &[4]), Ok(vec![4]));
    let [(_, late)] = <[_; 1]>::try_from(desk.wait_for(1)).ok().unwrap();
    assert_eq!(desk.withdrawn(), 1);
    late(answer(vec![9; 100_000]));
    assert_eq!(run_on(1, &*executor, &[5, 6]), Ok(vec![5, 6]));
}

#[test]
fn a_program_that_dies_or_hangs_in_a_call_withdraws_it() {
    let run = "    ask(1, 'other', b'abc')\n    if given(batch)[0] == 1: os._exit(3)\n    done(batch, answer_of(1))";
    let (odd, executor, desk) = asking(run);
    let found = run_on(1, &*executor, &[1]).unwrap_err();
    assert!(found.contains("it ended"), "{found}");
    assert_eq!((desk.wait_for(1).len(), desk.withdrawn()), (1, 1));
    eventually("another life", || executor.is_up());
    thread::scope(|scope| {
        let batch = scope.spawn(|| run_on(1, &*executor, &[2]));
        let asked = desk.wait_for(1);
        // Nobody answers, and the batch takes too long.
        executor.interrupt(1);
        let found = batch.join().unwrap().unwrap_err();
        assert!(found.contains("it did not answer in time") || found.contains("it ended"), "{found}");
        assert_eq!(desk.withdrawn(), 2);
        asked.into_iter().for_each(|(_, answered)| answered(answer(vec![1])));
    });
    eventually("another life", || executor.is_up());
    thread::scope(|scope| {
        let batch = scope.spawn(|| run_on(1, &*executor, &[2, 3, 4]));
        desk.wait_for(1)
            .into_iter()
            .for_each(|(question, answered)| answered(answer(question.inputs[0].data.to_vec())));
        assert_eq!(batch.join().unwrap(), Ok(b"abc".to_vec()));
    });
    assert_eq!(odd.lives(), 3);
}

#[test]
fn one_that_says_that_more_follows_than_may() {
    let run = "    ask(1, 'other', b'', bytes=1 << 40)\n    done(batch, given(batch))";
    let (_odd, executor, _desk) = asking(run);
    let found = run_on(1, &*executor, &[1]).unwrap_err();
    assert!(found.contains("it called a model with 1099511627776 bytes, expected at most 268435456"), "{found}");
}
