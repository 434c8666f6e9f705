//! Backends that alone host models end, and are drained: others host these first, and no request is lost.

use rustix::process::{Pid, Signal, kill_process};

use super::*;

const OTHER: &str = "inception_resnet_v2";

/// Two backends, each with a model that the other one's `placement` excludes.
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
    fn start() -> Self {
        let (x, y) = (rand::random_range(1..=254), rand::random_range(0..=255));
        let host = |last: u8| SocketAddr::from((Ipv4Addr::new(127, x, y, last), 4791));
        let ports = [(); 3].map(|()| Port::hold());
        let [http, listen, of_scheduler] = ports.each_ref().map(Port::address);
        let secret = "the cluster's secret";
        let own = format!("policy = 'eager'\nlisten = '{listen}'\naddress = '{}'\nsecret = \"{secret}\"\n", host(1));
        let scheduler = Role::start("scheduler", &format!("{own}[admin]\nhttp = '{of_scheduler}'\n"));
        let member = format!("scheduler = '{listen}'\nsecret = \"{secret}\"\nrepository = 'models'\n");
        let frontend = format!("{member}name = 'door'\naddress = '{}'\nhttp = '{http}'\n", host(2));
        let backend = |name, last, model| {
            format!("{member}name = '{name}'\naddress = '{}'\nplacement = {{ {model} = [0] }}\n", host(last))
        };
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
    let world = World::start();
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
