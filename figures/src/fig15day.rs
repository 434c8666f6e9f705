//! Symphony's Figure 15 with the advice acted on: a day, at its own pace.

use chart::{Axis, Chart, Mark, Panel, Series};
use proto::{ModelId, Span, Timestamp};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use scheduler::{
    Traffic,
    advice::{AdviceConfig, Advisor, Served},
};
use sim::{Report, Workload};

use crate::{
    context::{Context, Run, axis_of, policy},
    fig15::{GPUS, MODELS, Swing, cluster_of},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG15_DAY: Figure = Figure {
    name: "fig15day",
    title: "Symphony, Figure 15, acted on: a day",
    shows: "A day of the models of Figure 15 on up to 512 GPUs that come and go by the scheduler's advice, where a GPU \
            comes at once, after 30 s, or after 180 s. At night all models are suddenly asked for twice as often, for \
            an hour. The day is the first of ten that are drawn; every point is two minutes.",
    remarks: &[
        "The advice is what a scheduler gives, second by second, with its default window of a minute. Who acts on it \
         orders at once, and gives back at once.",
        "A cluster settles within milliseconds, and a day changes over minutes. So what part of the requests is lost, \
         and how long GPUs are busy, at a load is simulated once, request by request, with `downbeat` at an infinite \
         price on 256 GPUs; each second of a day takes it from there, with as many requests as chance brings.",
        "Whoever knows the day beforehand has, in each second, the fewest GPUs that lose at most 1 % of the requests.",
    ],
    draw,
};

/// From the order of a GPU until it serves.
const DELAYS_S: [u32; 3] = [0, 30, 180];
const DAYS: u64 = 10;
const DAY_S: u32 = 86_400;
/// The highest load of the day but for what is sudden, in GPUs that run the largest batches all the time.
const PEAK_GPUS: f64 = 300.0;
/// All models are asked for so much more often for an hour, which begins within these parts of the day.
const SUDDEN: f64 = 2.0;
const SUDDEN_S: u32 = 3_600;
const SUDDEN_AT: std::ops::Range<f64> = 0.05..0.1;
/// GPUs at first, as many times those that would do.
const AT_FIRST: f64 = 1.1;
/// A bad rate above it is bad (section 3.5).
const BAD: f64 = 0.01;
/// Where the cluster is simulated: its GPUs, and loads as parts of what these could serve.
const SIMULATED_GPUS: u32 = 256;
const LOADS: [f64; 16] = [0.1, 0.3, 0.5, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0, 1.2, 1.6, 2.5];
/// Of these a load at which all is served.
const QUIET_LOAD: f64 = 0.7;
const POINT_S: usize = 120;

/// What a load does to a cluster that has settled.
#[derive(Debug, Clone, Copy)]
struct Settled {
    /// Of what the GPUs could serve.
    load: f64,
    /// The part of the requests that is late or dropped.
    bad: f64,
    /// The part of their time in which GPUs are busy.
    busy: f64,
}

/// By load, ascending.
struct Curve(Vec<Settled>);

impl Curve {
    fn of(workload: &Workload, reports: &[Report]) -> Self {
        let settled = |report: &Report| Settled {
            load: report.rate_rps / workload.capacity_rps(),
            bad: report.totals.bad_rate(),
            busy: report.gpu_busy_fraction,
        };
        Self(reports.iter().map(settled).collect())
    }

    /// Between what was simulated; in proportion to the load below all of it.
    fn at(&self, load: f64) -> Settled {
        let next = self.0.partition_point(|settled| settled.load < load).min(self.0.len() - 1);
        let none = Settled { load: 0.0, bad: self.0[0].bad, busy: 0.0 };
        let (below, above) = (next.checked_sub(1).map_or(none, |below| self.0[below]), self.0[next]);
        let part = ((load - below.load) / (above.load - below.load)).min(1.0);
        let between = |below: f64, above: f64| below + part * (above - below);
        Settled { load, bad: between(below.bad, above.bad), busy: between(below.busy, above.busy) }
    }

    /// GPUs that a load keeps busy where all of it is served, for each one that it would with the largest batches.
    fn work(&self) -> f64 {
        let quiet = self.at(QUIET_LOAD);
        quiet.busy / quiet.load
    }

    /// The highest load with no more than [`BAD`].
    fn highest(&self) -> f64 {
        let (mut good, mut bad) = (0.0, self.0[self.0.len() - 1].load);
        for _ in 0..40 {
            let middle = f64::midpoint(good, bad);
            if self.at(middle).bad <= BAD { good = middle } else { bad = middle }
        }
        good
    }
}

/// What is asked for: by second, in GPUs that run the largest batches all the time.
struct Day {
    loads: Vec<f64>,
    /// When it changes suddenly.
    steps: Vec<u32>,
}

impl Day {
    fn draw(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let swings: Vec<Swing> = (0..MODELS).map(|model| Swing::draw(&mut rng, model)).collect();
        let sudden = (rng.random_range(SUDDEN_AT) * f64::from(DAY_S)) as u32;
        let sudden = sudden..sudden + SUDDEN_S;
        let load = |second: u32| {
            let at = f64::from(second) / f64::from(DAY_S);
            let all: f64 = swings.iter().map(|swing| swing.part(at)).sum();
            PEAK_GPUS / MODELS as f64 * all * if sudden.contains(&second) { SUDDEN } else { 1.0 }
        };
        let surge = [Swing::SURGE_AT.start, Swing::SURGE_AT.end].map(|at| (at * f64::from(DAY_S)).ceil() as u32);
        Self {
            loads: (0..DAY_S).map(load).collect(),
            steps: [sudden.start, sudden.end].into_iter().chain(surge).collect(),
        }
    }
}

/// A second of a day.
#[derive(Debug, Clone, Copy, Default)]
struct Moment {
    gpus: u32,
    asked: f64,
    lost: f64,
}

impl Moment {
    fn bad(self) -> f64 {
        self.lost / self.asked.max(1.0)
    }
}

/// GPUs follow the advice for a day, and come so much later.
fn follow(day: &Day, curve: &Curve, (gpu_rps, delay_s): (f64, u32), seed: u64) -> Vec<Moment> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let comes_after = Span::from_millis(1_000 * i64::from(delay_s));
    let mut advisor = Advisor::new(AdviceConfig { gpu_comes_after: comes_after, ..AdviceConfig::default() });
    advisor.handle_standing(Timestamp::ZERO, true);
    let hosted = std::sync::Arc::new(vec![ModelId(0)]);
    // Requests are alike here, so all models are as one, whose batches take what they would.
    let per_task = Span::from_millis_f64(1e3 * curve.work() / gpu_rps);
    let (gap, gpu_price) = (Span::from_micros(1), Traffic::ENDLESS_PRICE);
    let mut gpus = (AT_FIRST * f64::from(fewest(day.loads[0], curve.highest()))).ceil() as u32;
    // When which are there.
    let mut coming: Vec<(u32, u32)> = Vec::new();
    let mut moments = Vec::with_capacity(day.loads.len());
    for (second, load) in (0..).zip(&day.loads) {
        coming.retain(|&(at, count)| {
            let is_here = at <= second;
            gpus += if is_here { count } else { 0 };
            !is_here
        });
        let asked = chance(&mut rng, load * gpu_rps);
        let settled = curve.at(asked / gpu_rps / f64::from(gpus));
        let lost = (settled.bad * asked).round();
        moments.push(Moment { gpus, asked, lost });
        let busy = Span::from_millis_f64(1e3 * settled.busy * f64::from(gpus));
        let now = Timestamp::ZERO + Span::from_millis(1_000 * (i64::from(second) + 1));
        let traffic = Traffic { gap, arrived_at: now, fixed: Span::ZERO, per_task, target: 1, gpu_price };
        let (in_time, lost) = ((asked - lost) as u64, lost as u64);
        advisor.handle_served(ModelId(0), &Served { in_time, lost, busy, traffic: Some(traffic) });
        advisor.handle_gpus(now, std::iter::repeat_n(&hosted, gpus as usize).cloned());
        let Some(needed) = advisor.advice().needed else { continue };
        let (needed, ordered) = (needed.min(GPUS), coming.iter().map(|(_, count)| count).sum::<u32>());
        if needed > gpus + ordered {
            coming.push((second + 1 + delay_s, needed - gpus - ordered));
        } else {
            // What was ordered last is not wanted first.
            let mut excess = gpus + ordered - needed;
            while let Some((_, count)) = coming.last_mut().filter(|_| excess > 0) {
                let less = excess.min(*count);
                (*count, excess) = (*count - less, excess - less);
                if *count == 0 {
                    coming.pop();
                }
            }
            gpus -= excess;
        }
    }
    moments
}

/// GPUs that bear a load.
fn fewest(load: f64, highest: f64) -> u32 {
    ((load / highest).ceil() as u32).clamp(1, GPUS)
}

/// How many requests come in a second in which so many do on average: Poisson's, which is as good as normal.
fn chance(rng: &mut ChaCha8Rng, mean: f64) -> f64 {
    // Twelve of variance 1/12 each.
    let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    (mean + normal * mean.sqrt()).max(0.0).round()
}

/// What a day came to.
struct Sum {
    gpu_hours: f64,
    least_hours: f64,
    lost: f64,
    /// Seconds with more than [`BAD`], and of these those that no sudden change excuses.
    bad_s: u32,
    beyond_s: u32,
}

impl Sum {
    fn of(day: &Day, moments: &[Moment], highest: f64, delay_s: u32) -> Self {
        let hours = |gpus: u32| f64::from(gpus) / 3_600.0;
        let window_s = (AdviceConfig::default().window.as_secs_f64()) as u32;
        let is_excused =
            |second: u32| day.steps.iter().any(|&step| (step..=step + delay_s + window_s).contains(&second));
        let bad: Vec<u32> = (0..).zip(moments).filter(|(_, moment)| moment.bad() > BAD).map(|(at, _)| at).collect();
        Self {
            gpu_hours: moments.iter().map(|moment| hours(moment.gpus)).sum(),
            least_hours: day.loads.iter().map(|&load| hours(fewest(load, highest))).sum(),
            lost: moments.iter().map(|moment| moment.lost).sum::<f64>()
                / moments.iter().map(|moment| moment.asked).sum::<f64>(),
            bad_s: bad.len() as u32,
            beyond_s: bad.iter().filter(|&&second| !is_excused(second)).count() as u32,
        }
    }

    fn excess(&self) -> f64 {
        self.gpu_hours / self.least_hours - 1.0
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["GPU comes after (s)", "time (h)", "fewest GPUs", "GPUs", "bad rate (%)"]);
    let cluster = cluster_of(SIMULATED_GPUS);
    let capacity_rps = cluster.capacity_rps();
    let run = |load: f64| Run {
        workload: cluster.clone(),
        policy: policy("downbeat:gpu_price=inf"),
        rate_rps: load * capacity_rps,
    };
    let reports = context.runs(&LOADS.map(run), &mut table)?;
    let curve = Curve::of(&cluster, &reports);
    let (highest, gpu_rps) = (curve.highest(), capacity_rps / f64::from(SIMULATED_GPUS));
    table.note(
        "finding",
        format!("1 % is lost at {:.1} % of what GPUs could serve with the largest batches", 100.0 * highest),
    );
    let days: Vec<u64> = (0..DAYS).map(|day| context.seed + day).collect();
    context.bar.inc_length(days.len() as u64);
    let found = context.parallel(&days, |&seed| {
        let day = Day::draw(seed);
        let followed = DELAYS_S.map(|delay_s| follow(&day, &curve, (gpu_rps, delay_s), seed));
        Ok((day, followed))
    })?;
    for (place, delay_s) in DELAYS_S.into_iter().enumerate() {
        let sums: Vec<Sum> = found.iter().map(|(day, all)| Sum::of(day, &all[place], highest, delay_s)).collect();
        note_days(&mut table, delay_s, &sums);
    }
    let (day, followed) = &found[0];
    let least: Vec<f64> = day.loads.iter().map(|&load| f64::from(fewest(load, highest))).collect();
    let least = points(&least);
    let mut lines = Vec::new();
    for (delay_s, moments) in DELAYS_S.into_iter().zip(followed) {
        let of = |value: &dyn Fn(&Moment) -> f64| points(&moments.iter().map(value).collect::<Vec<_>>());
        let (gpus, bad) = (of(&|moment| f64::from(moment.gpus)), of(&|moment| 100.0 * moment.bad()));
        for ((least, gpus), bad) in least.iter().zip(&gpus).zip(&bad) {
            table.push([delay_s.to_string(), cell(gpus.0), cell(least.1), cell(gpus.1), cell(bad.1)]);
        }
        lines.push((delay_s, gpus, bad));
    }
    Ok((chart(&least, &lines), table))
}

fn note_days(table: &mut Table, delay_s: u32, sums: &[Sum]) {
    let most = |of: &dyn Fn(&Sum) -> f64| sums.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
    let mean = |of: &dyn Fn(&Sum) -> f64| sums.iter().map(of).sum::<f64>() / sums.len() as f64;
    table.note(
        "finding",
        format!(
            "A GPU comes after {delay_s} s: {:.1} % more GPU-hours than whoever knows the day beforehand (at most \
             {:.1} %), {:.3} % of the requests lost; more than 1 % in {:.0} s of a day, and but for a window and the \
             delay after a sudden change in {:.0} s (at most {:.0} s)",
            100.0 * mean(&Sum::excess),
            100.0 * most(&Sum::excess),
            100.0 * mean(&|sum| sum.lost),
            mean(&|sum| sum.bad_s.into()),
            mean(&|sum| sum.beyond_s.into()),
            most(&|sum| sum.beyond_s.into()),
        ),
    );
}

/// Means of [`POINT_S`] seconds each, over hours.
fn points(values: &[f64]) -> Vec<(f64, f64)> {
    let mean = |(index, values): (usize, &[f64])| {
        let hour = (index as f64 + 0.5) * POINT_S as f64 / 3_600.0;
        (hour, values.iter().sum::<f64>() / values.len() as f64)
    };
    values.chunks(POINT_S).enumerate().map(mean).collect()
}

/// GPUs and bad rate over hours.
type Line = (u32, Vec<(f64, f64)>, Vec<(f64, f64)>);

fn chart(least: &[(f64, f64)], lines: &[Line]) -> Chart {
    let series =
        |name: String, look, points: &[(f64, f64)]| Series { name, mark: Mark::Curve, look, points: points.into() };
    let legend = |delay_s: &u32| format!("GPUs come after {delay_s} s");
    let mut gpus = vec![series("the day known beforehand".into(), chart::GREY, least)];
    gpus.extend(lines.iter().enumerate().map(|(look, (delay_s, gpus, _))| series(legend(delay_s), look, gpus)));
    let bad: Vec<Series> =
        lines.iter().enumerate().map(|(look, (delay_s, _, bad))| series(legend(delay_s), look, bad)).collect();
    let panel = |title: &str, y: Axis, series| Panel {
        title: title.to_owned(),
        x: Axis::new("time (h)", (0.0, 24.0)),
        y,
        series,
        boxes: Vec::new(),
    };
    let panels =
        vec![panel("GPUs", axis_of("GPUs", &gpus), gpus), panel("bad rate", axis_of("late or dropped (%)", &bad), bad)];
    Chart::new(FIG15_DAY.title, 1, panels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve() -> Curve {
        let settled = |(load, bad, busy)| Settled { load, bad, busy };
        Curve([(0.7, 0.0, 0.7), (0.95, 0.0, 0.95), (1.0, 0.05, 1.0), (2.0, 0.5, 1.0)].map(settled).to_vec())
    }

    #[test]
    fn a_load_does_what_lies_between_those_that_were_simulated() {
        let at = |load| (curve().at(load).bad, curve().at(load).busy);
        let is_near = |(bad, busy): (f64, f64), to: (f64, f64)| (bad - to.0).abs() < 1e-9 && (busy - to.1).abs() < 1e-9;
        assert!(is_near(at(0.35), (0.0, 0.35)) && is_near(at(0.975), (0.025, 0.975)) && is_near(at(1.5), (0.275, 1.0)));
        assert!(is_near(at(9.0), (0.5, 1.0)), "nothing beyond the last was simulated");
        assert!((curve().highest() - 0.96).abs() < 1e-9 && (curve().work() - 1.0).abs() < 1e-9);
        assert_eq!((fewest(95.9, curve().highest()), fewest(96.5, curve().highest())), (100, 101));
    }

    #[test]
    fn gpus_follow_a_step_once_they_have_come_and_what_is_bad_is_counted() {
        let loads = [vec![50.0; 600], vec![100.0; 1_400]].concat();
        let day = Day { loads, steps: vec![600] };
        let moments = follow(&day, &curve(), (1e6, 30), 1);
        let (before, after) = (moments[599].gpus, moments[1_999].gpus);
        assert!((55..=60).contains(&before) && (107..=116).contains(&after), "{before}, {after}");
        assert!(moments[600..630].iter().all(|moment| moment.gpus == before), "none has come before 30 s");
        let sum = Sum::of(&day, &moments, curve().highest(), 30);
        assert!((30..=90).contains(&sum.bad_s) && sum.beyond_s == 0, "{} {}", sum.bad_s, sum.beyond_s);
        let unexcused = Day { steps: Vec::new(), ..day };
        let sum = Sum::of(&unexcused, &moments, curve().highest(), 30);
        assert_eq!(sum.beyond_s, sum.bad_s);
    }
}
