//! What backends host changes while requests are served: those that alone host models end, and are drained, and the
//! scheduler deals models to sub-clusters. No request is lost.

use rustix::process::{Pid, Signal, kill_process};

use super::*;

const OTHER: &str = "inception_resnet_v2";

/// Two backends, of one GPU each.
struct World {
    http: SocketAddr,
    listen: SocketAddr,
    of_scheduler: SocketAddr,
    scheduler: Role,
    _frontend: Role,
    backends: [String; 2],
    _ports: [Port; 3],
}

impl World {
    /// The scheduler has these keys, and each backend these, of which one may name its model.
    fn start(of_scheduler: &str, of_backend: impl Fn(&str) -> String) -> Self {
        let tables = of_scheduler;
        let (x, y) = (rand::random_range(1..=254), rand::random_range(0..=255));
        let host = |last: u8| SocketAddr::from((Ipv4Addr::new(127, x, y, last), 4791));
        let ports = [(); 3].map(|()| Port::hold());
        let [http, listen, of_scheduler] = ports.each_ref().map(Port::address);
        let secret = "the cluster's secret";
        let own = format!("policy = 'eager'\nlisten = '{listen}'\naddress = '{}'\nsecret = \"{secret}\"\n", host(1));
        let scheduler = Role::start("scheduler", &format!("{own}[admin]\nhttp = '{of_scheduler}'\n{tables}"));
        let member = format!("scheduler = '{listen}'\nsecret = \"{secret}\"\nrepository = 'models'\n");
        let frontend = format!("{member}name = 'door'\naddress = '{}'\nhttp = '{http}'\n", host(2));
        let backend =
            |name, last, model| format!("{member}name = '{name}'\naddress = '{}'\n{}\n", host(last), of_backend(model));
        let backends = [backend("one", 3, MODEL), backend("two", 4, OTHER)];
        let frontend = Role::start("frontend", &frontend);
        Self { http, listen, of_scheduler, scheduler, _frontend: frontend, backends, _ports: ports }
    }

    fn status(&self) -> String {
        status(self.of_scheduler)
    }

    fn drains(&self, verb: &str, name: &str) -> String {
        let (listen, config) = (self.listen.to_string(), self.scheduler.config.path().to_str().unwrap());
        printed(&[verb, "backend", name, "--scheduler", &listen, "--config", config])
    }

    /// Every request that is sent while something is done is served.
    fn served_while(&self, what: impl FnOnce()) {
        let http = self.http;
        let load = thread::spawn(move || send(http, 3.0));
        what();
        let tally = load.join().unwrap();
        assert!(tally.served > 0 && (tally.served, tally.wrong) == (tally.sent, 0), "{tally:?}");
    }
}

#[test]
fn a_backend_that_alone_hosts_a_model_ends_once_another_one_does() {
    let world = World::start("", |model| format!("placement = {{ {model} = [0] }}"));
    let [one, two] = world.backends.each_ref().map(|text| Role::start("backend", text));
    for model in [MODEL, OTHER] {
        eventually("a model that is ready", || is_ready(world.http, model));
    }
    let mut one = one;
    world.served_while(|| {
        kill_process(Pid::from_child(&one.child), Signal::TERM).unwrap();
        eventually("a backend that has ended", || one.child.try_wait().unwrap().is_some());
        assert!(is_ready(world.http, MODEL), "the other one hosts it");
    });
    // Its successor hosts it again, and the guest goes: both are where they were.
    let _one = Role::start("backend", &world.backends[0]);
    eventually("a backend that serves", || world.status().contains("backend   one "));
    world.served_while(|| {
        let text = world.drains("drain", "two");
        assert!(text.contains("serves on until others host 1 models that only it has"), "{text}");
        eventually("a backend that is drained", || world.status().contains("drained"));
        assert!(is_ready(world.http, OTHER), "the other one hosts it");
    });
    assert!(world.drains("resume", "two").contains("takes part again"));
    drop(two);
}

#[test]
fn models_are_dealt_to_sub_clusters_while_requests_are_served() {
    let pins = format!("pins = {{ {MODEL} = 0, {OTHER} = 1 }}");
    let placement = format!("[placement]\nsub_clusters = 2\nepoch_ms = 1000\n{pins}\n");
    let auto = |_: &str| format!("placement = 'auto'\nload_models = ['{MODEL}', '{OTHER}']");
    let world = World::start(&placement, auto);
    let _backends = world.backends.each_ref().map(|text| Role::start("backend", text));
    for model in [MODEL, OTHER] {
        eventually("a model that is ready", || is_ready(world.http, model));
    }
    world.served_while(|| {
        let alone = |model: &str| format!("no: only here 1 ({model})");
        eventually("each has a model", || [MODEL, OTHER].iter().all(|model| world.status().contains(&alone(model))));
    });
    assert!(send(world.http, 1.0).served > 0);
}
