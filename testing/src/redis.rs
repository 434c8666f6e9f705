//! A real `redis-server`, of Debian's package of that name.
#![allow(clippy::disallowed_methods, reason = "a process, and connections to it")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::{Port, eventually, skip};

/// A server at a port of its own, which keeps in its folder all that it has answered; it ends with this.
#[derive(Debug)]
pub struct RedisServer {
    port: Port,
    folder: PathBuf,
    options: Vec<String>,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts one with these options; `None`, and said so of the test `name`, where there is none to start.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(name: &str, folder: &Path, options: &[&str]) -> Option<Self> {
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            skip(name, "redis-server");
            return None;
        }
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = Self { port: Port::hold(), folder: folder.to_owned(), options, child: None };
        server.run();
        Some(server)
    }

    /// Starts it again at the same port, with what it had, and waits until it answers.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn run(&mut self) {
        let address = self.address();
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            &address.port().to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "yes",
        ]);
        command.args(["--appendfsync", "always", "--dir"]).arg(&self.folder).args(&self.options);
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        eventually("an answer of the server", || {
            TcpStream::connect(address).is_ok_and(|mut stream| {
                let asked = stream.write_all(b"PING\r\n");
                asked.and_then(|()| stream.read(&mut [0; 64])).is_ok_and(|read| read > 0)
            })
        });
    }

    /// Ends it at once.
    ///
    /// # Panics
    /// If that cannot be done.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn process(&self) -> Option<&Child> {
        self.child.as_ref()
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
