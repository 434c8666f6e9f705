//! How the GPUs are that this backend has opened, as Prometheus scrapes it and as the log tells it: the last readings
//! of each with their age, what holds its clocks back and which errors its memory has. No IO.
//!
//! Life of a GPU here: opened; read about once a second from then on, as far as the management library answers. What it
//! does not tell has no line. Readings stay until others come, however old they get: their age is told beside them.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt::Write as _,
};

use admin::label_value;
use cuda::{Brake, GpuHealth};
use proto::{Span, Timestamp};

/// Clocks that were not held back for so long are not any more. What works at its power limit is held back in one
/// second and not in the next.
const CALM: Span = Span::from_millis(10_000);

/// What the log is told, once when it begins and once when it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Clocks are held back.
    HeldBack {
        /// Whose, by its name and UUID.
        gpu: String,
        /// By what.
        by: Vec<Brake>,
    },
    /// They are not any more.
    Free {
        /// Whose.
        gpu: String,
        /// What has held them back since the beginning.
        by: Vec<Brake>,
        /// From the beginning until nothing did.
        lasted: Span,
    },
    /// Memory has errors that could not be corrected.
    Damaged {
        /// Whose.
        gpu: String,
        /// How many since the driver was loaded.
        errors: u64,
    },
    /// It has none any more: the driver was loaded anew.
    Whole {
        /// Whose.
        gpu: String,
    },
    /// It cannot be read.
    Unread {
        /// Which.
        gpu: String,
        /// Why, in one line.
        reason: String,
    },
    /// It can be again.
    Read {
        /// Which.
        gpu: String,
    },
}

/// The GPUs that are open.
#[derive(Debug, Default)]
pub struct Board {
    /// By UUID.
    gpus: BTreeMap<String, Gpu>,
    news: VecDeque<News>,
}

#[derive(Debug)]
struct Gpu {
    name: String,
    pci: String,
    /// When it was read last, or opened.
    since: Timestamp,
    read: Option<GpuHealth>,
    /// What it had drawn before it was opened here, in millijoules.
    energy_before_mj: Option<u64>,
    held_back: Option<HeldBack>,
    is_damaged: bool,
    is_unread: bool,
}

/// Clocks that are held back.
#[derive(Debug)]
struct HeldBack {
    since: Timestamp,
    last: Timestamp,
    by: Vec<Brake>,
}

impl Board {
    /// A GPU was opened: `uuid` as CUDA tells it, `pci` the address of the GPU that it is, or is an instance of.
    pub fn handle_opened(&mut self, now: Timestamp, uuid: &str, name: &str, pci: &str) {
        let gpu = Gpu {
            name: name.to_owned(),
            pci: pci.to_owned(),
            since: now,
            read: None,
            energy_before_mj: None,
            held_back: None,
            is_damaged: false,
            is_unread: false,
        };
        self.gpus.entry(uuid.to_owned()).or_insert(gpu);
    }

    /// Which GPUs are to be read: their UUIDs, and where they are on the PCI bus.
    #[must_use]
    pub fn wanted(&self) -> Vec<(String, String)> {
        self.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.pci.clone())).collect()
    }

    /// How a GPU is, or why that is not known.
    pub fn handle_read(&mut self, now: Timestamp, uuid: &str, read: Result<GpuHealth, String>) {
        let Some(gpu) = self.gpus.get_mut(uuid) else { return };
        let name = || format!("{} ({uuid})", gpu.name);
        let read = match read {
            Ok(read) => read,
            Err(reason) => {
                if !gpu.is_unread {
                    self.news.push_back(News::Unread { gpu: name(), reason });
                }
                gpu.is_unread = true;
                return;
            }
        };
        if gpu.is_unread {
            self.news.push_back(News::Read { gpu: name() });
        }
        // What it does not tell this time is as it was.
        if let Some(errors) = read.uncorrected_errors {
            match (gpu.is_damaged, errors > 0) {
                (false, true) => self.news.push_back(News::Damaged { gpu: name(), errors }),
                (true, false) => self.news.push_back(News::Whole { gpu: name() }),
                _ => {}
            }
            gpu.is_damaged = errors > 0;
        }
        if let Some(brakes) = &read.held_back_by {
            self.news.extend(brake(&mut gpu.held_back, now, brakes, name));
        }
        gpu.is_unread = false;
        gpu.since = now;
        gpu.energy_before_mj = gpu.energy_before_mj.or(read.energy_mj);
        gpu.read = Some(read);
    }

    /// What the log has not been told yet.
    pub fn poll_news(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// All that is known, in Prometheus's text format.
    #[must_use]
    pub fn text(&self, now: Timestamp) -> String {
        let mut text = String::new();
        for Family { name, kind, help, samples } in FAMILIES {
            let mut has_head = false;
            for (uuid, gpu) in &self.gpus {
                for (label, value) in samples(gpu, now) {
                    if !std::mem::replace(&mut has_head, true) {
                        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
                    }
                    let label = label.map_or(String::new(), |(key, value)| format!(",{key}=\"{value}\""));
                    let _ = writeln!(text, "{name}{{gpu_uuid=\"{}\"{label}}} {value}", label_value(uuid));
                }
            }
        }
        text
    }
}

/// What begins or ends as clocks are held back by these.
fn brake(
    held_back: &mut Option<HeldBack>,
    now: Timestamp,
    brakes: &[Brake],
    name: impl Fn() -> String,
) -> Option<News> {
    match held_back {
        None if brakes.is_empty() => None,
        None => {
            let by = brakes.to_vec();
            *held_back = Some(HeldBack { since: now, last: now, by: by.clone() });
            Some(News::HeldBack { gpu: name(), by })
        }
        Some(HeldBack { last, by, .. }) if !brakes.is_empty() => {
            *last = now;
            by.extend(brakes);
            by.sort_unstable();
            by.dedup();
            None
        }
        Some(HeldBack { last, .. }) if now - *last < CALM => None,
        Some(_) => {
            let HeldBack { since, last, by } = held_back.take()?;
            Some(News::Free { gpu: name(), by, lasted: last - since })
        }
    }
}

/// A label besides that of the GPU, and a value.
type Sample = (Option<(&'static str, &'static str)>, f64);

/// One metric.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: fn(&Gpu, Timestamp) -> Vec<Sample>,
}

/// Those that Triton has are called and counted as there; the others are ours.
const FAMILIES: &[Family] = &[
    Family {
        name: "nv_gpu_utilization",
        kind: "gauge",
        help: "Part of the last second or less in which the GPU computed something, 0 to 1",
        samples: |gpu, _| one(gpu, |read| read.utilization_percent.map(|percent| f64::from(percent) / 100.0)),
    },
    Family {
        name: "nv_gpu_memory_total_bytes",
        kind: "gauge",
        help: "Memory of the GPU",
        samples: |gpu, _| one(gpu, |read| read.memory_bytes.map(|(total, _)| total as f64)),
    },
    Family {
        name: "nv_gpu_memory_used_bytes",
        kind: "gauge",
        help: "Of that, what is in use by whomever",
        samples: |gpu, _| one(gpu, |read| read.memory_bytes.map(|(_, used)| used as f64)),
    },
    Family {
        name: "nv_gpu_power_usage",
        kind: "gauge",
        help: "What the GPU draws, in watts",
        samples: |gpu, _| one(gpu, |read| read.power_mw.map(|mw| f64::from(mw) / 1e3)),
    },
    Family {
        name: "nv_gpu_power_limit",
        kind: "gauge",
        help: "What the GPU may draw at most, in watts",
        samples: |gpu, _| one(gpu, |read| read.power_limit_mw.map(|mw| f64::from(mw) / 1e3)),
    },
    Family {
        name: "nv_energy_consumption",
        kind: "counter",
        help: "What the GPU has drawn since this backend opened it, in joules",
        samples: |gpu, _| {
            let before = gpu.energy_before_mj.unwrap_or(0);
            one(gpu, |read| read.energy_mj.map(|mj| mj.saturating_sub(before) as f64 / 1e3))
        },
    },
    Family {
        name: "downbeat_gpu_temperature_celsius",
        kind: "gauge",
        help: "Temperature of the GPU",
        samples: |gpu, _| one(gpu, |read| read.temperature_c.map(f64::from)),
    },
    Family {
        name: "downbeat_gpu_clock_hertz",
        kind: "gauge",
        help: "Clocks of the multiprocessors (sm) and of the memory now",
        samples: |gpu, _| clocks(gpu, |(now, _)| now),
    },
    Family {
        name: "downbeat_gpu_clock_max_hertz",
        kind: "gauge",
        help: "The highest that these may be",
        samples: |gpu, _| clocks(gpu, |(_, most)| most),
    },
    Family {
        name: "downbeat_gpu_clocks_held_back",
        kind: "gauge",
        help: "1 while this holds clocks back, so that batches take longer than predicted",
        samples: |gpu, _| {
            let Some(held_back_by) = gpu.read.as_ref().and_then(|read| read.held_back_by.as_ref()) else {
                return Vec::new();
            };
            let is_one = |brake: Brake| f64::from(u8::from(held_back_by.contains(&brake)));
            Brake::ALL.map(|brake| (Some(("by", brake.name())), is_one(brake))).into()
        },
    },
    Family {
        name: "downbeat_gpu_memory_errors_total",
        kind: "counter",
        help: "Errors of the GPU's memory since the driver was loaded",
        samples: |gpu, _| {
            let Some(read) = &gpu.read else { return Vec::new() };
            let of = |kind, errors: Option<u64>| errors.map(|errors| (Some(("kind", kind)), errors as f64));
            let errors = [of("corrected", read.corrected_errors), of("uncorrected", read.uncorrected_errors)];
            errors.into_iter().flatten().collect()
        },
    },
    Family {
        name: "downbeat_gpu_readings_age_seconds",
        kind: "gauge",
        help: "How old all of these are; while there are none, since when the GPU is open",
        samples: |gpu, now| vec![(None, (now - gpu.since).as_secs_f64().max(0.0))],
    },
];

fn one(gpu: &Gpu, value: impl Fn(&GpuHealth) -> Option<f64>) -> Vec<Sample> {
    gpu.read.as_ref().and_then(value).map(|value| (None, value)).into_iter().collect()
}

fn clocks(gpu: &Gpu, which: impl Fn((u32, u32)) -> u32) -> Vec<Sample> {
    let Some(read) = &gpu.read else { return Vec::new() };
    let of = |clock, mhz: Option<(u32, u32)>| mhz.map(|mhz| (Some(("clock", clock)), f64::from(which(mhz)) * 1e6));
    [of("sm", read.clock_mhz), of("memory", read.memory_clock_mhz)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-5a";

    fn at(seconds: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(1_000 * seconds)
    }

    fn board() -> Board {
        let mut board = Board::default();
        board.handle_opened(at(1), UUID, "NVIDIA H200", "0000:3b:00.0");
        board
    }

    fn steady() -> GpuHealth {
        GpuHealth {
            memory_bytes: Some((8 << 30, 1 << 30)),
            utilization_percent: Some(37),
            temperature_c: Some(41),
            clock_mhz: Some((1500, 1980)),
            memory_clock_mhz: Some((2600, 3200)),
            power_mw: Some(250_500),
            power_limit_mw: Some(700_000),
            energy_mj: Some(5_000_000),
            held_back_by: Some(vec![]),
            corrected_errors: Some(3),
            uncorrected_errors: Some(0),
            ..GpuHealth::default()
        }
    }

    fn news(board: &mut Board, seconds: i64, read: Result<GpuHealth, String>) -> Option<News> {
        board.handle_read(at(seconds), UUID, read);
        let news = board.poll_news();
        assert_eq!(board.poll_news(), None, "one thing at a time");
        news
    }

    fn value(text: &str, name: &str) -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    #[test]
    fn readings_have_tritons_names_and_units_where_it_has_them() {
        let mut board = board();
        assert_eq!(news(&mut board, 2, Ok(steady())), None);
        let hot = GpuHealth {
            energy_mj: Some(5_400_500),
            held_back_by: Some(vec![Brake::Heat]),
            uncorrected_errors: Some(2),
            ..steady()
        };
        board.handle_read(at(3), UUID, Ok(hot));
        let text = board.text(at(5));
        for (name, expected) in [
            ("nv_gpu_utilization{gpu_uuid=\"GPU-5a\"}", 0.37),
            ("nv_gpu_memory_total_bytes{gpu_uuid=\"GPU-5a\"}", 8_589_934_592.0),
            ("nv_gpu_memory_used_bytes{gpu_uuid=\"GPU-5a\"}", 1_073_741_824.0),
            ("nv_gpu_power_usage{gpu_uuid=\"GPU-5a\"}", 250.5),
            ("nv_gpu_power_limit{gpu_uuid=\"GPU-5a\"}", 700.0),
            ("nv_energy_consumption{gpu_uuid=\"GPU-5a\"}", 400.5),
            ("downbeat_gpu_temperature_celsius{gpu_uuid=\"GPU-5a\"}", 41.0),
            ("downbeat_gpu_clock_hertz{gpu_uuid=\"GPU-5a\",clock=\"sm\"}", 1.5e9),
            ("downbeat_gpu_clock_hertz{gpu_uuid=\"GPU-5a\",clock=\"memory\"}", 2.6e9),
            ("downbeat_gpu_clock_max_hertz{gpu_uuid=\"GPU-5a\",clock=\"sm\"}", 1.98e9),
            ("downbeat_gpu_clocks_held_back{gpu_uuid=\"GPU-5a\",by=\"heat\"}", 1.0),
            ("downbeat_gpu_clocks_held_back{gpu_uuid=\"GPU-5a\",by=\"power_limit\"}", 0.0),
            ("downbeat_gpu_memory_errors_total{gpu_uuid=\"GPU-5a\",kind=\"corrected\"}", 3.0),
            ("downbeat_gpu_memory_errors_total{gpu_uuid=\"GPU-5a\",kind=\"uncorrected\"}", 2.0),
            ("downbeat_gpu_readings_age_seconds{gpu_uuid=\"GPU-5a\"}", 2.0),
        ] {
            assert_eq!(value(&text, name), Some(expected), "{name} in\n{text}");
        }
        let heads = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        assert_eq!((heads, text.lines().filter(|line| line.starts_with("# HELP ")).count()), (FAMILIES.len(), heads));
    }

    #[test]
    fn what_a_gpu_does_not_tell_has_no_line_and_its_age_has_one_from_the_start() {
        let mut board = board();
        assert_eq!(board.text(at(4)).lines().filter(|line| !line.starts_with('#')).count(), 1);
        board.handle_read(at(4), UUID, Ok(GpuHealth::default()));
        let text = board.text(at(4));
        assert_eq!(value(&text, "downbeat_gpu_readings_age_seconds{gpu_uuid=\"GPU-5a\"}"), Some(0.0));
        assert_eq!(text.lines().count(), 3, "{text}");
        assert_eq!(Board::default().text(at(4)), "");
    }

    #[test]
    fn readings_stay_with_their_age_while_there_are_no_others() {
        let mut board = board();
        board.handle_read(at(2), UUID, Ok(steady()));
        let lost = || Err("NVML: the GPU is lost".to_owned());
        assert!(matches!(news(&mut board, 3, lost()), Some(News::Unread { reason, .. }) if reason.contains("lost")));
        assert_eq!(news(&mut board, 4, lost()), None, "once");
        let text = board.text(at(10));
        assert_eq!(value(&text, "downbeat_gpu_readings_age_seconds{gpu_uuid=\"GPU-5a\"}"), Some(8.0));
        assert_eq!(value(&text, "downbeat_gpu_temperature_celsius{gpu_uuid=\"GPU-5a\"}"), Some(41.0));
        assert_eq!(news(&mut board, 11, Ok(steady())), Some(News::Read { gpu: "NVIDIA H200 (GPU-5a)".into() }));
        assert_eq!(news(&mut board, 12, Ok(steady())), None);
    }

    #[test]
    fn clocks_that_are_held_back_are_told_once_and_once_when_they_have_been_free_for_a_while() {
        let held_back = |by: &[Brake]| Ok(GpuHealth { held_back_by: Some(by.to_vec()), ..steady() });
        let gpu = || "NVIDIA H200 (GPU-5a)".to_owned();
        let mut board = board();
        let begun = news(&mut board, 2, held_back(&[Brake::PowerLimit]));
        assert_eq!(begun, Some(News::HeldBack { gpu: gpu(), by: vec![Brake::PowerLimit] }));
        for seconds in 3..100 {
            let by: &[Brake] = if seconds % 9 == 0 { &[Brake::Heat] } else { &[] };
            assert_eq!(news(&mut board, seconds, held_back(by)), None, "they have not been free for long");
        }
        for seconds in 100..109 {
            assert_eq!(news(&mut board, seconds, held_back(&[])), None);
        }
        let (by, lasted) = (vec![Brake::PowerLimit, Brake::Heat], at(99) - at(2));
        assert_eq!(news(&mut board, 109, held_back(&[])), Some(News::Free { gpu: gpu(), by, lasted }));
        assert_eq!(news(&mut board, 110, held_back(&[])), None);
        let again = news(&mut board, 111, held_back(&[Brake::PowerBrake]));
        assert_eq!(again, Some(News::HeldBack { gpu: gpu(), by: vec![Brake::PowerBrake] }));
    }

    #[test]
    fn clocks_are_held_back_until_a_reading_says_that_they_are_not() {
        let held_back = |by: Option<Vec<Brake>>| Ok(GpuHealth { held_back_by: by, ..steady() });
        let mut board = board();
        assert!(news(&mut board, 2, held_back(Some(vec![Brake::Heat]))).is_some());
        for seconds in 3..100 {
            assert_eq!(news(&mut board, seconds, held_back(None)), None, "it does not say so");
        }
        assert!(matches!(news(&mut board, 100, held_back(Some(vec![]))), Some(News::Free { .. })));
    }

    #[test]
    fn errors_that_could_not_be_corrected_are_told_once_and_once_when_they_are_gone() {
        let damaged = |errors| Ok(GpuHealth { uncorrected_errors: Some(errors), ..steady() });
        let gpu = || "NVIDIA H200 (GPU-5a)".to_owned();
        let mut board = board();
        assert_eq!(news(&mut board, 2, damaged(1)), Some(News::Damaged { gpu: gpu(), errors: 1 }));
        assert_eq!(news(&mut board, 3, damaged(7)), None);
        assert_eq!(news(&mut board, 4, damaged(0)), Some(News::Whole { gpu: gpu() }));
        assert_eq!(news(&mut board, 5, damaged(0)), None);
    }

    #[test]
    fn memory_has_errors_until_a_reading_says_that_it_has_none() {
        let damaged = |errors| Ok(GpuHealth { uncorrected_errors: errors, ..steady() });
        let mut board = board();
        assert!(matches!(news(&mut board, 2, damaged(Some(1))), Some(News::Damaged { .. })));
        assert_eq!(news(&mut board, 3, damaged(None)), None, "it does not say so");
        assert_eq!(news(&mut board, 4, damaged(Some(1))), None, "once");
        assert!(matches!(news(&mut board, 5, damaged(Some(0))), Some(News::Whole { .. })));
    }
}
