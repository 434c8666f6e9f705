//! What frontends are told of models: who serves them, what clients have made of them, and what could not be loaded.

use proto::{
    FrontendId, ModelId,
    hello::Member,
    scheduler_to_frontend::{NetworkTimes, SchedulerToFrontend},
};

use super::{
    Control, ControlOutput,
    members::Told,
    topics::{ANSWERS_MAX, Announcements, Topic},
};
use crate::{news::PlannedWith, shard::Violation};

impl Control {
    /// A frontend has read a page.
    pub(super) fn on_page_read(&mut self, frontend: FrontendId) -> Result<(), Violation> {
        let Some(entry) = self.members.frontends.get_mut(&frontend) else { return Ok(()) };
        if !entry.announcements.handle_read() {
            return Err(Violation("it has read a page that it was not sent".to_owned()));
        }
        self.tell(frontend, []);
        Ok(())
    }

    /// Tells a new frontend all that it does not learn from [`Self::announce`].
    pub(super) fn tell_all(&mut self, frontend: FrontendId) {
        let states = self.changes.names().into_iter().map(|name| Topic::State(name.to_owned()));
        let failures = self.failures.names().map(|(name, version)| Topic::Failure(name.to_owned(), version.to_owned()));
        let models = (0..).map(ModelId).zip(&self.members.models);
        let times = models.filter(|(_, entry)| entry.request_times.is_some()).map(|(id, _)| Topic::RequestTimes(id));
        let topics: Vec<Topic> = states.chain(failures).chain(times).collect();
        self.tell(frontend, topics);
    }

    /// Tells all frontends.
    pub(super) fn tell_each(&mut self, topic: &Topic) {
        let frontends: Vec<FrontendId> = self.members.frontends.keys().copied().collect();
        frontends.into_iter().for_each(|frontend| self.tell(frontend, [topic.clone()]));
    }

    /// Tells frontends what is another than they were told.
    pub(super) fn announce(&mut self) {
        self.announce_models((0..self.members.models.len() as u32).map(ModelId));
    }

    /// The same of these models alone.
    pub(super) fn announce_models(&mut self, models: impl IntoIterator<Item = ModelId> + Clone) {
        let frontends: Vec<FrontendId> = self.members.frontends.keys().copied().collect();
        for frontend in frontends {
            let is_news = |model: &ModelId| self.news_of(frontend, *model).is_some();
            let news: Vec<Topic> = models.clone().into_iter().filter(is_news).map(Topic::Model).collect();
            self.tell(frontend, news);
        }
    }

    /// Lists what a frontend is to be told, and tells it as much as it may be told now.
    pub(super) fn tell(&mut self, frontend: FrontendId, topics: impl IntoIterator<Item = Topic>) {
        let Some(entry) = self.members.frontends.get_mut(&frontend) else { return };
        topics.into_iter().for_each(|topic| entry.announcements.list(topic));
        while let Some(topic) = self.announcements_of(frontend).and_then(Announcements::poll) {
            let Some(message) = self.message(frontend, topic) else { continue };
            let bytes = wincode::serialized_size(&message).expect("its size is that of memory");
            self.outputs.push_back(ControlOutput::ToFrontend(frontend, message));
            let announcements = self.announcements_of(frontend).expect("it has just been told something");
            if announcements.handle_told(bytes as usize) {
                self.outputs.push_back(ControlOutput::ToFrontend(frontend, SchedulerToFrontend::PageEnd));
            }
        }
        if self.announcements_of(frontend).is_some_and(|announcements| announcements.answers() > ANSWERS_MAX) {
            let reason = "it asks for changes of models, and reads no answer".to_owned();
            self.outputs.push_back(ControlOutput::Close(Member::Frontend(frontend), reason));
        }
    }

    fn announcements_of(&mut self, frontend: FrontendId) -> Option<&mut Announcements> {
        self.members.frontends.get_mut(&frontend).map(|entry| &mut entry.announcements)
    }

    /// What is to be said now, if there is still anything to say. It is taken for told.
    fn message(&mut self, frontend: FrontendId, topic: Topic) -> Option<SchedulerToFrontend> {
        match topic {
            Topic::Model(model) => {
                let told = self.news_of(frontend, model)?;
                self.members.frontends.get_mut(&frontend)?.told.insert(model, told);
                let Told { gpus, least_latency, batching, network, model_thread } = told;
                let entry = &self.members.models[model.0 as usize];
                let (name, version) = (entry.name.clone(), entry.version.clone());
                Some(SchedulerToFrontend::Model {
                    model,
                    name,
                    version,
                    gpus,
                    least_latency,
                    batching,
                    network,
                    model_thread,
                })
            }
            Topic::RequestTimes(model) => {
                let times = self.members.models[model.0 as usize].request_times.as_ref()?;
                Some(SchedulerToFrontend::RequestTimes { model, times: Box::new(times.clone()) })
            }
            Topic::State(name) => {
                let (state, loads) = self.changes.state(&name);
                let brought = self.changes.brought(&name).cloned();
                Some(SchedulerToFrontend::ModelState { name, state, loads, brought })
            }
            Topic::Failure(name, version) => {
                let reason = self.failures.reason(&name, &version).map(str::to_owned);
                Some(SchedulerToFrontend::NotLoaded { name, version, reason })
            }
            Topic::Changed(change, refused) => Some(SchedulerToFrontend::ModelChanged { change, refused }),
        }
    }

    /// How a model is served, if the frontend was not told so, and the model's owner has said what it plans with.
    fn news_of(&self, frontend: FrontendId, model: ModelId) -> Option<Told> {
        let entry = &self.members.models[model.0 as usize];
        let PlannedWith { least: execution, batching, budget } = entry.planned?;
        let network = NetworkTimes { ctrl: budget.ctrl, data: budget.data_per_task, resp: self.resp.planned() };
        // A slower network than the configured one refuses nothing.
        let (ctrl, data) = (self.config.budget.ctrl, self.read_time(model).least());
        let (ctrl, data) = (budget.ctrl.min(ctrl), budget.data_per_task.min(data));
        let least_latency = execution + ctrl + data + self.resp.allowed();
        let gpus = if self.members.is_served(frontend) { entry.hosts } else { 0 };
        let told = Told { gpus, least_latency, batching, network, model_thread: entry.owner };
        let known = self.members.frontends.get(&frontend)?.told.get(&model);
        (known != Some(&told)).then_some(told)
    }
}
