//! How a frontend is, for whoever looks after its process (`[admin]`): the frontend's thread stamps a heart, and reads
//! what is counted when another thread is asked for it. Part of the driver.

use std::{convert::Infallible, sync::mpsc::SyncSender, time::Duration};

use admin::{AdminError, Heart, Listener, Pages, Vitals};
use tokio::sync::mpsc;
use transport::Clock;

use crate::{config::Config, metrics::Reading, server::Server};

/// How often the thread says that it lives.
const EVERY: Duration = Duration::from_millis(250);
/// How long it is waited for what it counts; one that stalls is not.
const PATIENCE: Duration = Duration::from_secs(1);

/// The frontend's end.
pub(crate) struct Vital {
    clock: Clock,
    vitals: Vitals,
    heart: Heart,
    asked: mpsc::Receiver<SyncSender<Reading>>,
    _listener: Listener,
}

impl Vital {
    /// Listens, if that is configured.
    ///
    /// # Errors
    /// If nothing can listen there.
    pub(crate) fn start(config: &Config) -> Result<Option<Self>, AdminError> {
        let (clock, vitals) = (Clock::start(), Vitals::default());
        // Whoever asks waits until it is answered.
        let (ask, asked) = mpsc::channel::<SyncSender<Reading>>(1);
        let counted = move |_| {
            let (tell, told) = std::sync::mpsc::sync_channel(1);
            let reading = ask.try_send(tell).ok().and_then(|()| told.recv_timeout(PATIENCE).ok());
            reading.map_or(String::new(), |reading| reading.own_text())
        };
        let pages = Pages::new("frontend", config.network.member_name(), vitals.clone(), counted);
        let listener = Listener::start(config.admin.as_ref(), clock, pages)?;
        let heart = vitals.heart("frontend");
        Ok(listener.map(|listener| Self { clock, vitals, heart, asked, _listener: listener }))
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
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                Some(tell) = self.asked.recv() => {
                    let service = &server.service;
                    // It is waited for no more.
                    let _ = tell.try_send(service.record.read_metrics(&service.desk));
                }
            }
        }
    }
}
