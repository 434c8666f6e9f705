use proto::{GpuId, ModelThreadId, Span, weights::WeightsTally};

use super::*;
use crate::{
    advice::{AdviceConfig, Advisor},
    history::Event,
    snapshot::Whereabouts,
};

/// On both clocks.
const NOW: (Timestamp, Timestamp) = (Timestamp::ZERO, Timestamp::ZERO);

fn gpu(id: u32, models: impl IntoIterator<Item = u32>) -> GpuShown {
    let models = Arc::new(models.into_iter().map(ModelId).collect());
    GpuShown { id: GpuId(id), is_usable: true, is_planned: true, models, pages: None }
}

fn backend(id: u32, gpus: Vec<GpuShown>) -> BackendShown {
    let path = Some(transport::Path::soft(([10, 0, 0, 3], 4791).into()));
    let at = Some(Whereabouts { address: ([10, 0, 0, 3], 40_000).into(), path });
    let (state, weights) = (MemberState::Serving, WeightsTally { pages: 4, pages_used: 3, ..WeightsTally::default() });
    BackendShown { id, name: format!("b{id}"), at, state, obeys: true, links: 1, sub_cluster: None, weights, gpus }
}

fn frontend(id: u32) -> FrontendShown {
    FrontendShown { id, name: format!("f{id}"), at: None, state: MemberState::Serving, obeys: true }
}

/// What is told of these, with so many models.
fn status(backends: Vec<BackendShown>, frontends: u32, models: usize) -> Status {
    let board = Board::default();
    let schedulers = vec![SchedulerState::Unreachable, SchedulerState::Primary];
    let frontends = (0..frontends).map(frontend).collect();
    let snapshot = Snapshot { rank: 1, schedulers, frontends, backends, ..Snapshot::default() };
    let names = (0..models).map(|id| (format!("m{id}"), "1".to_owned())).collect();
    board.publisher().turn(Timestamp::ZERO, |_| (snapshot, names));
    Status::new(board, "a".to_owned(), "soft".to_owned(), vec!["s0:7400".to_owned(), "s1:7400".to_owned()])
}

fn page(status: &Status, query: &str) -> ClusterPage {
    serde_json::from_str(&status.page((Timestamp::ZERO + Span::from_millis(40), Timestamp::ZERO), query).unwrap())
        .unwrap()
}

/// By backend: whether it is safe to remove, how many models are only there, and which are named.
fn safety(page: &ClusterPage) -> Vec<(bool, usize, Vec<&str>)> {
    let row = |row: &BackendRow| (row.safe_to_remove, row.only_here, row.only_here_first.len());
    let named = |row: &'_ BackendRow| row.only_here_first.clone();
    assert!(page.backends.iter().all(|backend| row(backend).2 == named(backend).len()));
    let rows = page.backends.iter();
    rows.map(|row| (row.safe_to_remove, row.only_here, row.only_here_first.iter().map(String::as_str).collect()))
        .collect()
}

#[test]
fn a_backend_is_safe_to_remove_if_others_that_live_host_all_that_it_does() {
    let two = || vec![backend(1, vec![gpu(0, [0, 1]), gpu(1, [1])]), backend(2, vec![gpu(2, [0])])];
    let told = status(two(), 1, 2);
    assert_eq!(safety(&page(&told, "")), [(false, 1, vec!["m1"]), (true, 0, vec![])]);

    // The other one's GPU fails, or it leaves, or it is not linked.
    let mut broken = two();
    broken[1].gpus[0].is_usable = false;
    assert_eq!(safety(&page(&status(broken, 1, 2), ""))[0], (false, 2, vec!["m0", "m1"]));
    for state in [MemberState::Leaving, MemberState::Drained, MemberState::Unlinked, MemberState::Joining] {
        let mut gone = two();
        gone[1].state = state;
        // It takes nothing away.
        assert_eq!(safety(&page(&status(gone, 1, 2), "")), [(false, 2, vec!["m0", "m1"]), (true, 0, vec![])]);
    }
    // What a broken GPU hosts is served elsewhere, or is missed already: by removing it for good.
    let mut own = two();
    own[0].gpus[0].is_usable = false;
    assert_eq!(safety(&page(&status(own, 1, 2), ""))[0], (false, 1, vec!["m1"]));
    let many = vec![backend(1, vec![gpu(0, 0..5)])];
    assert_eq!(safety(&page(&status(many, 1, 5), "")), [(false, 5, vec!["m0", "m1", "m2"])]);
}

#[test]
fn a_page_tells_of_schedulers_members_gpus_and_models() {
    let mut broken = gpu(7, [0]);
    (broken.is_usable, broken.pages) = (false, Some(4));
    let told = status(vec![backend(1, vec![gpu(6, [0, 1]), broken])], 2, 3);
    let page = page(&told, "page=0");
    assert!((page.page, page.pages, page.is_primary) == (0, 1, true) && page.age_ms == 40.0);
    let states: Vec<_> = page.schedulers.iter().map(|row| (row.address.as_str(), row.state.as_str())).collect();
    assert_eq!(states, [("s0:7400", "unreachable"), ("s1:7400", "primary")]);
    let serving = Counts { frontends_serving: 2, backends_serving: 1, gpus_serving: 1, ..Counts::default() };
    let counts = Counts { frontends: 2, backends: 1, gpus: 2, models: 3, models_hosted: 2, ..serving };
    assert_eq!((page.counts, page.frontends.len()), (counts, 2));
    let [row] = &page.backends[..] else { panic!("{page:?}") };
    assert_eq!((row.address.as_deref(), row.path.as_deref()), (Some("10.0.0.3:40000"), Some("soft 10.0.0.3:4791")));
    assert_eq!((row.weights.gpu_bytes, row.weights.gpu_bytes_used), (64 << 20, 48 << 20));
    let gpus: Vec<_> = row.gpus.iter().map(|gpu| (gpu.id, gpu.state.as_str(), gpu.models)).collect();
    assert_eq!(gpus, [(6, "serving", 2), (7, "unusable", 1)]);
    assert_eq!((row.models, row.gpus[1].weights_bytes), (2, Some(64 << 20)));
    let models: Vec<_> = page.models.iter().map(|row| (row.name.as_str(), row.backends, row.gpus)).collect();
    assert_eq!(models, [("m0", 1, 1), ("m1", 1, 1), ("m2", 0, 0)]);
}

#[test]
fn pages_of_a_large_cluster_are_bounded_and_have_all_of_it_once() {
    let backends: Vec<_> = (0..450).map(|id| backend(id, vec![gpu(id, 0..4_000); 1])).collect();
    let told = status(backends, 250, 4_000);
    let pages: Vec<_> = (0..4).map(|number| page(&told, &format!("page={number}"))).collect();
    assert!(pages.iter().all(|page| page.pages == 4 && page.counts.backends == 450));
    assert!(pages.iter().all(|page| page.backends.len() <= 200 && page.models.len() <= 1_000));
    let ids = |of: fn(&ClusterPage) -> Vec<u32>| pages.iter().flat_map(of).collect::<Vec<_>>();
    assert_eq!(ids(|page| page.backends.iter().map(|row| row.id).collect()), (0..450).collect::<Vec<_>>());
    assert_eq!(ids(|page| page.frontends.iter().map(|row| row.id).collect()), (0..250).collect::<Vec<_>>());
    assert!(pages.iter().flat_map(|page| &page.models).enumerate().all(|(id, row)| row.name == format!("m{id}")));
    let text = told.page(NOW, "").unwrap();
    assert!(text.len() < 256 * 1024, "{}", text.len());
}

#[test]
fn a_page_may_be_of_a_part_of_what_matches_and_of_few_rows() {
    let mut backends: Vec<_> = (0..60).map(|id| backend(id, vec![gpu(id, 0..3)])).collect();
    backends[41].state = MemberState::Drained;
    backends[43].gpus[0].is_usable = false;
    let told = status(backends, 3, 4_000);
    let rows = |query| {
        let page = page(&told, query);
        let backends = page.backends.iter().map(|row| row.id).collect::<Vec<_>>();
        assert_eq!((page.counts.models, page.counts.backends_serving, page.counts.gpus_serving), (4_000, 59, 58));
        (page.pages, page.frontends.len(), backends, page.models.len())
    };
    assert_eq!(rows("part=members&rows=25&page=2"), (3, 0, (50..60).collect(), 0));
    assert_eq!(rows("part=members&rows=25&match=F1"), (1, 1, vec![], 0));
    assert_eq!(rows("part=members&match=b5"), (1, 0, [5].into_iter().chain(50..60).collect(), 0));
    // By the state of a member, or of one of its GPUs.
    assert_eq!(rows("part=members&match=drained"), (1, 0, vec![41], 0));
    assert_eq!(rows("part=members&match=unusable"), (1, 0, vec![43], 0));
    assert_eq!(rows("part=models&rows=40"), (100, 0, vec![], 40));
    assert_eq!(rows("part=models&rows=40&match=m399"), (1, 0, vec![], 11));
    assert_eq!(rows("match=nothing"), (1, 0, vec![], 0));
    assert_eq!(told.page(NOW, "rows=0").unwrap_err(), "rows: found 0, expected 1 to 1000");
    let wrong = told.page(NOW, "part=gpus").unwrap_err();
    assert_eq!(wrong, "part: found `gpus`, expected one of all, members, models");
}

#[test]
fn what_is_asked_wrongly_is_named_and_a_scheduler_that_has_told_nothing_yet_says_so() {
    let told = status(Vec::new(), 0, 0);
    let wrong = |query| told.page(NOW, query).unwrap_err();
    assert_eq!(wrong("page=1"), "page: found 1, expected one below 1");
    assert_eq!(wrong("page=-1"), "page: found `-1`, expected a number");
    assert_eq!(wrong("page=18446744073709551615"), "page: found 18446744073709551615, expected one below 1");
    assert!(told.page(NOW, "other=1").is_ok());
    let empty = Status::new(Board::default(), "a".to_owned(), "soft".to_owned(), Vec::new());
    assert!(empty.page(NOW, "").unwrap_err().ends_with("try again"));
}

#[test]
fn news_of_models_and_members_are_taken_in() {
    let board = Board::default();
    let told = Status::new(board.clone(), "a".to_owned(), "soft".to_owned(), vec!["s:1".to_owned()]);
    let mut publisher = board.publisher();
    let of = |backends: Vec<BackendShown>| Snapshot { backends, ..Snapshot::default() };
    let named = |from: usize, to: usize| (from..to).map(|id| (format!("m{id}"), "1".to_owned())).collect();
    publisher.turn(Timestamp::ZERO, |from| (of(vec![backend(1, vec![gpu(0, [0])])]), named(from, 1)));
    assert_eq!(page(&told, "").counts.models_hosted, 1);
    let later = Timestamp::ZERO + Span::from_millis(300);
    publisher.turn(later, |from| (of(vec![backend(2, vec![gpu(1, [1])])]), named(from, 2)));
    let page = page(&told, "");
    let ids: Vec<_> = page.backends.iter().map(|row| row.id).collect();
    assert_eq!((ids, page.counts.models, page.counts.models_hosted), (vec![2], 2, 1));
    assert_eq!(page.models[1].backends, 1);
}

#[test]
fn a_model_is_in_the_sub_cluster_of_all_that_host_it() {
    let at = |id: u32, sub_cluster, models: &[u32]| BackendShown {
        sub_cluster,
        ..backend(id, vec![gpu(2 * id, models.iter().copied()), gpu(2 * id + 1, models.iter().copied())])
    };
    // Models: at home in 0; in 1; in both, as it moves; in 0 and at a backend that is in none; only there; nowhere.
    let backends = vec![
        at(0, Some(0), &[0, 2]),
        at(1, Some(0), &[0, 3]),
        at(2, Some(1), &[1, 2]),
        at(3, None, &[3, 4]),
        at(4, Some(0), &[2]),
    ];
    let page = page(&status(backends, 1, 6), "");
    let told: Vec<_> = page.models.iter().map(|row| (row.backends_placed, row.sub_cluster)).collect();
    assert_eq!(told, [(2, Some(0)), (1, Some(1)), (3, None), (1, Some(0)), (0, None), (0, None)]);
    assert_eq!(page.backends.iter().map(|row| row.sub_cluster).collect::<Vec<_>>()[2..4], [Some(1), None]);
}

#[test]
fn the_advice_is_told_with_the_names_of_what_each_sub_cluster_hosts_on_the_first_page() {
    let mut advisor = Advisor::new(AdviceConfig::default());
    advisor.handle_standing(Timestamp::ZERO, true);
    let hosted = [0..4_000, 0..1].map(|ids: std::ops::Range<u32>| Arc::new(ids.map(ModelId).collect::<Vec<_>>()));
    advisor.handle_gpus(Timestamp::ZERO + Span::from_millis(60_000), hosted.into_iter());
    let board = Board::default();
    let snapshot = Snapshot { advice: advisor.advice(), ..Snapshot::default() };
    // Two versions of each.
    let names = (0..4_000).map(|id| (format!("m{:04}", id / 2), (id % 2).to_string())).collect();
    board.publisher().turn(Timestamp::ZERO, |_| (snapshot, names));
    let told = Status::new(board, "a".to_owned(), "soft".to_owned(), vec!["s0:7400".to_owned()]);
    let (first, second) = (page(&told, "").advice, page(&told, "page=1").advice);
    assert_eq!((first.gpus, first.gpus_needed, second.gpus_needed), (2, Some(2), Some(2)));
    let rows: Vec<_> = first.sub_clusters.iter().map(|row| (row.models, row.models_first.join(" "))).collect();
    assert_eq!(rows, [(1, "m0000".to_owned()), (2_000, "m0000 m0001 m0002".to_owned())]);
    assert!(second.sub_clusters.is_empty());
    let metrics = told.metrics();
    assert!(metrics.contains("\ndownbeat_subcluster_gpus_needed{models=\"m0000\"} 1\n"), "{metrics}");
    assert!(metrics.contains("{models=\"m0000,m0001,m0002,..\"} 1\n"), "{metrics}");
}

#[test]
fn a_scheduler_that_is_not_the_primary_advises_nothing() {
    let told = status(vec![backend(1, vec![gpu(0, [0])])], 1, 1);
    assert_eq!(told.metrics(), "");
    let advice = page(&told, "").advice;
    assert_eq!((advice.gpus_needed, advice.reason.as_str()), (None, "this scheduler is not the primary"));
}

#[test]
fn what_gpus_ran_lately_is_told_where_it_is_kept() {
    let told = || status(vec![backend(1, vec![gpu(0, [0]), gpu(1, [0])])], 0, 2);
    assert_eq!(page(&told(), "").backends[0].gpus[0].ran, None);
    let (history, at) = (History::new(1), |ms| Timestamp::ZERO + Span::from_millis(ms));
    let batch = |started_at, finished_at| {
        let (model, tasks, window) = (ModelId(1), 4, None);
        Event::Batch { model, tasks, window, started_at, finished_at }
    };
    let lane = Lane { backend: BackendId(1), gpu: 1 };
    history.recorder(ModelThreadId(0)).note(at(5_000), lane, batch(at(4_500), at(5_000)));
    let told = told().with_history(Some(history.clone()));
    let ran = |now: Timestamp, index: usize| {
        let text = told.page((Timestamp::ZERO, now), "").unwrap();
        serde_json::from_str::<ClusterPage>(&text).unwrap().backends[0].gpus[index].ran.clone().unwrap()
    };
    assert_eq!(ran(at(5_000), 0), RanRow { busy: 0.0, model: None, batch: None });
    let row = RanRow { busy: 0.25, model: Some("m1".to_owned()), batch: Some(4) };
    assert_eq!(ran(at(5_000), 1), row);
    // It is not worked out for each page, but anew after a while, and where the clock is another one.
    history.recorder(ModelThreadId(0)).note(at(5_200), lane, batch(at(5_000), at(5_200)));
    assert_eq!(ran(at(5_249), 1), row);
    assert_eq!(ran(at(5_250), 1).busy, 0.35);
    assert_eq!(ran(at(4_000), 1).busy, 0.0);
}
