//! Part of the driver: brings what ensembles learn in contexts to a Redis, and tells what is known there, over one
//! connection and from a thread of its own, so that no request and no packet waits for it. What is exchanged, when, and
//! what becomes of a batch that failed is `ensembles::contexts`' to say; here each batch is tried once, in
//! `redis_timeout_ms`, its connection included.
//!
//! A script does all of a batch in one step (`redis/exchange.lua`): increments, which may come from any frontend in any
//! order, and the sums after them. It knows the number of each frontend's last batch, so one that is sent again, as
//! nobody knows what became of it, counts once.
#![allow(clippy::disallowed_methods)] // A driver: it has a socket, a thread and a clock.

mod resp;

use std::{convert::Infallible, fmt, fs, path::PathBuf, sync::Arc, time::Duration};

use ensembles::{
    contexts::{Batch, Item, Read},
    selection::Sums,
};
use frontend::excerpt;
use percent_encoding::percent_decode_str;
use proto::Span;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::{mpsc, oneshot},
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use transport::Address;

use self::resp::Value;
use crate::{
    config::{RedisUrl, SelectionConfig},
    selections::Selections,
    service::Service,
};

const SCRIPT: &str = include_str!("redis/exchange.lua");
/// How long a frontend's last batch is known: longer than one is sent again.
const BATCH_KNOWN_MS: &str = "86400000";
/// Of a reply; 128 contexts of 32 members have less.
const REPLY_BYTES_MAX: usize = 4 << 20;
/// Of a file with a password.
const PASSWORD_BYTES_MAX: usize = 4096;
/// What numbers of a script can tell apart.
const WHOLE_MAX: u64 = 1 << 53;

/// What became of a batch: of each context what is known of it, or why it is not; or why nothing is known of any.
pub(crate) type Exchanged = Result<Vec<Result<Read, String>>, String>;

type Waiting = (Arc<Batch>, oneshot::Sender<Exchanged>);

/// The thread that has the connection.
pub(crate) struct Redis {
    batches: mpsc::Sender<Waiting>,
}

/// Where it is, and who we are there.
struct Place {
    address: Address,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    database: u32,
    user: Option<String>,
    password: Password,
    timeout: Duration,
    /// How long contexts stay that nobody uses.
    ttl_s: String,
    /// What knows the number of our last batch.
    applied: String,
}

enum Password {
    None,
    Is(String),
    /// Read anew for each connection.
    In(PathBuf),
}

/// Reads what [`Redis::start`] does.
///
/// # Errors
/// One line that names the key.
pub(crate) fn check(config: &SelectionConfig) -> Result<(), String> {
    let place = Place::of(config, 0)?;
    place.password.read().map(drop)
}

impl Redis {
    /// Starts the thread, with which these contexts are exchanged. It ends with what is returned.
    ///
    /// # Errors
    /// One line that names the key.
    pub(crate) fn start(config: &SelectionConfig, selections: &Selections) -> Result<Self, String> {
        selections.share();
        Self::start_in(config, selections.life())
    }

    fn start_in(config: &SelectionConfig, life: u64) -> Result<Self, String> {
        let place = Place::of(config, life)?;
        let no_thread = |error| format!("selection.redis: its thread cannot be set up: {error}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_thread)?;
        // There is one at a time.
        let (batches, waiting) = mpsc::channel(1);
        let run = move || runtime.block_on(place.serve(waiting));
        std::thread::Builder::new().name("redis".into()).spawn(run).map_err(no_thread)?;
        Ok(Self { batches })
    }

    /// Tries a batch once.
    pub(crate) async fn exchange(&self, batch: Arc<Batch>) -> Exchanged {
        let gone = || "its thread has ended".to_owned();
        let (told, exchanged) = oneshot::channel();
        self.batches.send((batch, told)).await.map_err(|_| gone())?;
        exchanged.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Exchanges what there is to exchange.
    pub(crate) async fn run(self, service: &Service) -> Infallible {
        let (selections, now) = (&service.selections, || service.desk.now());
        loop {
            if let Some(batch) = selections.poll_batch(now()) {
                let exchanged = self.exchange(batch).await;
                let known = exchanged.ok().map(|known| known.into_iter().map(Result::ok).collect());
                selections.handle_exchanged(&service.record, now(), known);
                continue;
            }
            match selections.poll_timeout() {
                Some(at) => tokio::time::sleep((at - now()).max(Span::ZERO).to_duration()).await,
                None => selections.woken().await,
            }
        }
    }
}

impl Place {
    fn of(config: &SelectionConfig, life: u64) -> Result<Self, String> {
        let SelectionConfig { redis: RedisUrl(url), redis_password_file, redis_timeout_ms, context_ttl_secs, .. } =
            config;
        let wrong = || {
            let found = excerpt(config.redis.without_secret());
            format!("selection.redis: found '{found}', expected redis[s]://[[USER]:PASSWORD@]HOST:PORT[/DATABASE]")
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let (who, place) = rest.rsplit_once('@').map_or((None, rest), |(who, place)| (Some(who), place));
        let (address, database) = place.split_once('/').unwrap_or((place, ""));
        let address: Address = address.parse().map_err(|_| wrong())?;
        let tls = match (scheme, &config.redis_authority) {
            ("redis", None) => None,
            ("redis", Some(_)) => {
                return Err("selection.redis_authority: found a file, expected none for redis://".to_owned());
            }
            ("rediss", None) => {
                let expected = "a file (PEM) with who vouches for the server of rediss://";
                return Err(format!("selection.redis_authority: found none, expected {expected}"));
            }
            ("rediss", Some(file)) => {
                let client = transport::client_tls("selection.redis_authority", file);
                let client = client.map_err(|error| error.to_string())?;
                let name = match address.name() {
                    Some((host, _)) => ServerName::try_from(host.to_owned()).ok(),
                    None => address.ip().map(|at| ServerName::from(at.ip())),
                };
                Some((TlsConnector::from(Arc::new(client)), name.ok_or_else(wrong)?))
            }
            _ => return Err(wrong()),
        };
        let database = if database.is_empty() { 0 } else { database.parse().map_err(|_| wrong())? };
        let decoded = |text: &str| -> Result<String, String> {
            percent_decode_str(text).decode_utf8().map(Into::into).map_err(|_| wrong())
        };
        let (user, password) = who.map_or((None, None), |who| match who.split_once(':') {
            Some((user, password)) => (Some(user), Some(password)),
            None => (Some(who), None),
        });
        let user = user.filter(|user| !user.is_empty()).map(decoded).transpose()?;
        let password = match (password.map(decoded).transpose()?, redis_password_file) {
            (Some(_), Some(_)) => {
                return Err("selection.redis_password_file: found a password in selection.redis too, expected one of \
                            both"
                    .to_owned());
            }
            (Some(password), None) => Password::Is(password),
            (None, Some(file)) => Password::In(file.clone()),
            (None, None) => Password::None,
        };
        if user.is_some() && matches!(password, Password::None) {
            return Err(wrong());
        }
        for (key, found) in [("redis_timeout_ms", *redis_timeout_ms), ("context_ttl_secs", *context_ttl_secs)] {
            if !(1..=u64::from(u32::MAX)).contains(&found) {
                return Err(format!("selection.{key}: found {found}, expected 1 to {}", u32::MAX));
            }
        }
        let (timeout, ttl_s) = (Duration::from_millis(*redis_timeout_ms), context_ttl_secs.to_string());
        let applied = format!("downbeat:applied:{life:016x}");
        Ok(Self { address, tls, database, user, password, timeout, ttl_s, applied })
    }

    async fn serve(self, mut waiting: mpsc::Receiver<Waiting>) {
        let (mut connection, mut was_wrong) = (None, false);
        while let Some((batch, told)) = waiting.recv().await {
            let exchanged = tokio::time::timeout(self.timeout, self.exchange(&mut connection, &batch)).await;
            let exchanged = exchanged.unwrap_or_else(|_| Err(format!("no answer in {} ms", self.timeout.as_millis())));
            match &exchanged {
                Ok(_) if was_wrong => tracing::info!("selection.redis: {} answers again", self.address),
                Err(why) if !was_wrong => {
                    tracing::warn!(
                        "selection.redis: {}: {why}; requests are answered with what is known",
                        self.address
                    );
                }
                _ => (),
            }
            was_wrong = exchanged.is_err();
            // What is left of another reply would be taken for the next one's.
            if was_wrong {
                connection = None;
            }
            let _ = told.send(exchanged);
        }
    }

    async fn exchange(&self, connection: &mut Option<Connection>, batch: &Batch) -> Exchanged {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(self.connect().await?),
        };
        let Value::List(told) = connection.ask(&self.command(batch)).await? else { return Err(nonsense()) };
        if told.len() != batch.items.len() {
            return Err(nonsense());
        }
        Ok(told.into_iter().zip(&batch.items).map(|(told, item)| read_of(told, item)).collect())
    }

    async fn connect(&self) -> Result<Connection, String> {
        let stream = TcpStream::connect(self.address.to_string()).await.map_err(|error| error.to_string())?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(stream),
            Some((tls, name)) => {
                let connected = tls.connect(name.clone(), stream).await;
                Box::new(connected.map_err(|error| format!("no TLS: {}", excerpt(&error.to_string())))?)
            }
        };
        let mut connection = Connection { stream, unread: Vec::new() };
        let database = self.database.to_string();
        let mut commands: Vec<Vec<&[u8]>> = Vec::new();
        let password = self.password.read()?;
        if let Some(password) = &password {
            let user = self.user.iter().map(String::as_bytes);
            commands.push([&b"AUTH"[..]].into_iter().chain(user).chain([password.as_bytes()]).collect());
        }
        if self.database != 0 {
            commands.push(vec![b"SELECT", database.as_bytes()]);
        }
        for command in commands {
            connection.ask(&command).await?;
        }
        Ok(connection)
    }

    /// The script's call.
    fn command(&self, batch: &Batch) -> Vec<Vec<u8>> {
        let keys = (batch.items.len() + 1).to_string();
        let mut parts = vec!["EVAL".to_owned(), SCRIPT.to_owned(), keys, self.applied.clone()];
        parts.extend(batch.items.iter().map(|item| format!("downbeat:context:{}:{}", item.kind.key, item.name)));
        parts.extend([batch.number.to_string(), BATCH_KNOWN_MS.to_owned(), self.ttl_s.clone()]);
        for Item { kind, sums, .. } in &batch.items {
            let cells = || {
                let members = |(block, losses): (&u64, &Vec<(f64, u64)>)| {
                    let cells = losses.iter().enumerate().filter(|(_, (_, count))| *count > 0);
                    let cell = |(member, (sum, count)): (usize, &(f64, u64))| {
                        [block.to_string(), member.to_string(), sum.to_string(), count.to_string()]
                    };
                    cells.map(cell).collect::<Vec<_>>()
                };
                sums.blocks.iter().flat_map(members)
            };
            let count = cells().count();
            parts.extend([
                kind.members.to_string(),
                kind.block.to_string(),
                sums.requests.to_string(),
                count.to_string(),
            ]);
            parts.extend(cells().flatten());
        }
        parts.into_iter().map(String::into_bytes).collect()
    }
}

impl Password {
    fn read(&self) -> Result<Option<String>, String> {
        match self {
            Self::None => Ok(None),
            Self::Is(password) => Ok(Some(password.clone())),
            Self::In(file) => {
                let wrong = |found: fmt::Arguments<'_>| {
                    format!(
                        "selection.redis_password_file: found {found} in {}, expected 1 to {PASSWORD_BYTES_MAX} bytes",
                        file.display()
                    )
                };
                let text =
                    fs::read_to_string(file).map_err(|error| wrong(format_args!("nothing to read ({error})")))?;
                let password = text.trim_end_matches(['\r', '\n']);
                match password.len() {
                    1..=PASSWORD_BYTES_MAX => Ok(Some(password.to_owned())),
                    found => Err(wrong(format_args!("{found} bytes"))),
                }
            }
        }
    }
}

/// With TLS or without.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

struct Connection {
    stream: Box<dyn Stream>,
    unread: Vec<u8>,
}

impl Connection {
    /// Asks, and waits for what is no error.
    async fn ask(&mut self, command: &[impl AsRef<[u8]>]) -> Result<Value, String> {
        let parts: Vec<&[u8]> = command.iter().map(AsRef::as_ref).collect();
        let mut bytes = Vec::new();
        resp::write(&parts, &mut bytes);
        self.stream.write_all(&bytes).await.map_err(|error| error.to_string())?;
        self.stream.flush().await.map_err(|error| error.to_string())?;
        loop {
            if let Some((value, rest)) = resp::read(&self.unread).map_err(|_| nonsense())? {
                self.unread = rest.to_vec();
                return match value {
                    Value::Error(why) => Err(excerpt(&why)),
                    value => Ok(value),
                };
            }
            if self.unread.len() > REPLY_BYTES_MAX {
                return Err(nonsense());
            }
            self.unread.reserve(1 << 14);
            if self.stream.read_buf(&mut self.unread).await.map_err(|error| error.to_string())? == 0 {
                return Err("it has closed the connection".to_owned());
            }
        }
    }
}

fn nonsense() -> String {
    "found something else at its address, expected a Redis, 6 or later".to_owned()
}

/// What a server tells of a context.
fn read_of(told: Value, item: &Item) -> Result<Read, String> {
    let Value::List(told) = told else { return Err(nonsense()) };
    match &told[..] {
        [Value::Text(wrong), Value::Text(why)] if wrong == "wrong" => Err(excerpt(why)),
        [Value::Number(is_stored), Value::Text(requests), Value::Text(oldest), Value::List(cells)] => {
            let sums = sums_of(requests, oldest, cells, item.kind.members).ok_or_else(nonsense)?;
            Ok(Read { sums, is_stored: *is_stored == 1 })
        }
        _ => Err(nonsense()),
    }
}

fn sums_of(requests: &str, oldest: &str, cells: &[Value], members: usize) -> Option<Sums> {
    let whole = |text: &str| text.parse::<u64>().ok().filter(|number| *number <= WHOLE_MAX);
    let mut sums = Sums { requests: whole(requests)?, ..Sums::default() };
    for (number, block) in (whole(oldest)?..).zip(cells.chunks(2 * members.max(1))) {
        let mut losses = Vec::with_capacity(members);
        for cell in block.chunks(2) {
            losses.push(match cell {
                [Value::Text(sum), Value::Text(count)] => {
                    (sum.parse().ok().filter(|sum| (0.0..=WHOLE_MAX as f64).contains(sum))?, whole(count)?)
                }
                [Value::Nothing, Value::Nothing] => (0.0, 0),
                _ => return None,
            });
        }
        if losses.len() != members {
            return None;
        }
        if losses.iter().any(|(_, count)| *count > 0) {
            sums.blocks.insert(number, losses);
        }
    }
    Some(sums)
}

#[cfg(test)]
pub(crate) mod tests;
