//! How a frontend is, for whoever looks after its process (`[admin]`): the frontend's thread stamps a heart, and reads
//! what is counted when another thread is asked for it. Part of the driver.

use std::{convert::Infallible, sync::mpsc::SyncSender, time::Duration};

use admin::{AdminError, Heart, Listener, Pages, Service, Vitals};
use tokio::sync::mpsc;
use transport::Clock;

use crate::{
    config::Config,
    metrics::{Reading, TRAFFIC_PATH},
    recent,
    record::Record,
    server::Server,
};

/// How often the thread says that it lives.
const EVERY: Duration = Duration::from_millis(250);
/// How long it is waited for what it counts or remembers; one that stalls is not.
const PATIENCE: Duration = Duration::from_secs(1);

/// What another thread asks the frontend's, and where the answer is waited for.
enum Question {
    Counts(SyncSender<Reading>),
    /// By a query.
    Requests(String, SyncSender<Result<String, String>>),
}

/// The answer to a question, unless the thread stalls.
fn answered<T>(ask: &mpsc::Sender<Question>, question: impl FnOnce(SyncSender<T>) -> Question) -> Option<T> {
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    ask.try_send(question(tell)).ok().and_then(|()| told.recv_timeout(PATIENCE).ok())
}

/// The frontend's end.
pub(crate) struct Vital {
    clock: Clock,
    vitals: Vitals,
    heart: Heart,
    asked: mpsc::Receiver<Question>,
    _listener: Option<Listener>,
    _service: Option<Service>,
}

impl Vital {
    /// Listens, if that is configured, and tells the service manager, if there is one.
    ///
    /// # Errors
    /// If nothing can listen there.
    pub(crate) fn start(config: &Config, record: &Record) -> Result<Option<Self>, AdminError> {
        let (clock, vitals) = (Clock::start(), Vitals::default());
        // Whoever asks waits until it is answered.
        let (ask, asked) = mpsc::channel(1);
        let of_requests = ask.clone();
        let counted =
            move |_| answered(&ask, Question::Counts).map_or(String::new(), |reading: Reading| reading.own_text());
        // That a thread stalls is told elsewhere: it is no fault of the query.
        let requests = move |_, query: &str| {
            let query = query.to_owned();
            answered(&of_requests, |tell| Question::Requests(query, tell)).unwrap_or_else(|| Ok("{}\n".to_owned()))
        };
        let name = config.network.member_name();
        let traffic = record.traffic(name.clone());
        let pages = Pages::new("frontend", name, vitals.clone(), counted)
            .with_json(TRAFFIC_PATH, move |now, query| traffic.page(now, query))
            .with_json(recent::PATH, requests);
        let listener = Listener::start(config.admin.as_ref(), clock, pages)?;
        let service = Service::start(clock, &vitals)?;
        let heart = vitals.heart("frontend");
        let is_asked = listener.is_some() || service.is_some();
        Ok(is_asked.then_some(Self { clock, vitals, heart, asked, _listener: listener, _service: service }))
    }

    /// Goes on as long as the frontend's thread does.
    pub(crate) async fn run(mut self, server: &Server) -> Infallible {
        loop {
            self.heart.beat(self.clock.now());
            let is_ready = server.service.is_ready();
            self.vitals.set_ready(if is_ready {
                Ok(())
            } else {
                Err("it has no scheduler, lacks models, or is drained")
            });
            if server.service.is_draining() {
                self.vitals.set_ending();
            }
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                Some(question) = self.asked.recv() => answer(question, server),
            }
        }
    }
}

fn answer(question: Question, server: &Server) {
    let service = &server.service;
    // It may be waited for no more.
    let _ = match question {
        Question::Counts(tell) => tell.try_send(service.record.read_metrics(&service.desk)).is_ok(),
        Question::Requests(query, tell) => tell.try_send(service.recent.borrow().page(&query)).is_ok(),
    };
}
