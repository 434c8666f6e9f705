//! What programs of models say: however a socket cuts them, lines are lines; and a line is a message or a breach in one
//! line. What is taken for inside of an area is. An answer to a batch gives each task an output of the model's, a
//! reason, or is a breach, whatever lies in the memory: that of tensors of one size, and of those that differ.
#![no_main]

// As the backend has them, which links more than a target needs.
#[allow(dead_code)]
#[path = "../../backend/src/executor/process/layout.rs"]
mod layout;
#[path = "../../backend/src/executor/process/records.rs"]
mod records;

use std::{fs, sync::LazyLock};

use layout::Layout;
use libfuzzer_sys::fuzz_target;
use proto::backend_to_program::{Answered, Area, Breach, FromProgram, LINE_BYTES_MAX, Lines, line};
use repository::{
    Model,
    cell::{self, Cell},
};

const COMMON: &str = r#"
    backend: "process" max_batch_size: 4
    parameters { key: "program" value { string_value: "none" } }
    parameters { key: "max_dims" value { string_value: "5" } }
    parameters { key: "max_bytes" value { string_value: "64" } }
    input { name: "text" data_type: TYPE_STRING dims: -1 optional: true }
"#;
const VARIABLE: &str = r#"
    output [ { name: "words" data_type: TYPE_STRING dims: -1 }, { name: "ids" data_type: TYPE_INT64 dims: [ -1, 2 ] },
             { name: "fixed" data_type: TYPE_UINT8 dims: 2 reshape { shape: [ 2, 1 ] } } ]
"#;
const FIXED: &str = r#"
    input { name: "x" data_type: TYPE_UINT8 dims: 1 }
    output [ { name: "y" data_type: TYPE_INT16 dims: [ 2 ] }, { name: "z" data_type: TYPE_BOOL dims: 1 } ]
"#;

/// A model of each kind.
static MODELS: LazyLock<[(Model, Layout); 2]> = LazyLock::new(|| {
    [(COMMON.to_owned() + VARIABLE), COMMON[..COMMON.find("input").unwrap()].to_owned() + FIXED].map(|config| {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("model/1")).unwrap();
        fs::write(folder.path().join("model/config.pbtxt"), config).unwrap();
        let model = repository::load_model(&folder.path().join("model")).unwrap();
        let layout = Layout::new(&model);
        (model, layout)
    })
});

/// Three tasks. Of records, two have the same shape, and one leaves its input out.
fn batch(model: &Model) -> Vec<u8> {
    if !cell::is_record(&model.inputs) {
        return vec![1, 2, 3];
    }
    let text = |shape: Vec<usize>, data: &'static [u8]| Some(Cell { shape, data });
    let tasks = [text(vec![1], &[1, 0, 0, 0, 97]), None, text(vec![1], &[0; 4])];
    let record = |task: Option<Cell<'static>>| {
        let mut record = vec![0; model.input_bytes()];
        let bytes = cell::write(&model.inputs, &[task], &mut record).unwrap();
        record.truncate(bytes);
        record
    };
    tasks.into_iter().flat_map(record).collect()
}

/// Answers three tasks with `memory` in the area, and zeros behind it.
fn answer((model, layout): &(Model, Layout), answers: &[Answered], memory: &[u8]) {
    let mut placement = layout.place(&batch(model), |_, _| Ok::<(), Breach>(())).unwrap();
    assert_eq!(placement.groups.drain(..).map(|group| group.tasks).sum::<usize>(), 3);
    let Area { offset: from, bytes: room } = layout.output_area;
    let mut outputs = vec![0xaa; 3 * model.output_bytes()];
    let taken = layout.take(placement, answers, &mut outputs, |offset, into| {
        assert!(offset >= from && offset + into.len() as u64 <= from + room);
        let written = memory.iter().skip((offset - from) as usize).chain(std::iter::repeat(&0));
        into.iter_mut().zip(written).for_each(|(byte, &written)| *byte = written);
        Ok::<(), Breach>(())
    });
    let failed = match taken {
        Err(breach) => return assert!(!breach.0.contains('\n'), "{breach}"),
        Ok(failed) => failed,
    };
    assert!(failed.is_sorted_by(|one, other| one.0 < other.0));
    for (task, room) in outputs.chunks_exact(model.output_bytes()).enumerate() {
        if failed.iter().all(|(failed, _)| *failed != task) {
            let bytes = if cell::is_record(&model.outputs) { cell::record_bytes(room).unwrap() } else { room.len() };
            cell::read(&model.outputs, &room[..bytes]).expect("what was taken can be read");
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&cut, said)) = bytes.split_first() else { return };
    let mut lines = Lines::default();
    let mut found = Vec::new();
    for piece in said.chunks(usize::from(cut) + 1) {
        lines.handle_bytes(piece);
        while let Some(line) = lines.poll().expect("it is shorter than the longest line") {
            found.push(line);
        }
    }
    let whole: Vec<&[u8]> = said.split(|&byte| byte == b'\n').collect();
    let (rest, whole) = whole.split_last().expect("there is at least one");
    assert!(said.len() < LINE_BYTES_MAX && found == whole);
    for text in found {
        match FromProgram::parse(&text) {
            Err(breach) => assert!(!breach.0.contains('\n'), "{breach}"),
            // Its numbers may be any, and are not written as they were read.
            Ok(FromProgram::Config(_) | FromProgram::Metrics(_)) => {}
            Ok(message) => {
                let again = line(&message);
                assert_eq!(FromProgram::parse(&again[..again.len() - 1]).as_ref(), Ok(&message));
                let FromProgram::Done { groups, .. } = message else { continue };
                let area = Area { offset: 128, bytes: 1_000 };
                let inside = groups.iter().flat_map(|group| &group.outputs).filter(|output| output.lies_in(area));
                inside.for_each(|output| assert!(output.offset >= 128 && output.bytes <= 1_128 - output.offset));
                // What lies in the memory is what comes behind the last line.
                MODELS.iter().for_each(|model| answer(model, &groups, rest));
            }
        }
    }
});
