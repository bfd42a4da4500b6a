//! Brokers that the tests of drivers share.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub use penstock_conformance::words::*;
use penstock_conformance::{Ability, has_wall_clock, wall_clock};
pub use penstock_conformance::{PATIENCE, TestClient};
use penstock_driver::{Driver, DriverConfig};
use penstock_local::connect;
use penstock_message::{Capabilities, Query};
use penstock_wire::native::{in_memory, on_disk};
use tempfile::TempDir;

/// Token of every server here.
const TOKEN: &str = "conformance";

/// Returns the penstock executable of this build; builds it if it is missing.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "penstock-cli"])
            .status()
            .expect("cargo runs");
        assert!(built.success(), "the penstock executable does not build");
        // This test is at target/PROFILE/deps/NAME.
        let test = std::env::current_exe().expect("a test knows its own path");
        let profile = test.ancestors().nth(2).expect("a target directory");
        profile.join("penstock")
    })
}

/// Broker of one kind, with its own directory.
pub struct BrokerPlace {
    pub url: String,
    pub directory: TempDir,
    server: Option<Mutex<Child>>,
    /// The only client there can be, where each client has its own broker.
    only_client: Option<TestClient>,
    pub outlives_kills: bool,
}

impl BrokerPlace {
    pub fn memory() -> Self {
        let mut place = Self {
            url: "memory:".to_owned(),
            directory: tempfile::tempdir().unwrap(),
            server: None,
            only_client: None,
            outlives_kills: false,
        };
        place.only_client = Some(place.client());
        place
    }

    pub fn local() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self {
            url: format!("local:{}", directory.path().join("data").display()),
            directory,
            server: None,
            only_client: None,
            outlives_kills: true,
        }
    }

    pub fn unix() -> Self {
        Self::served(|directory| format!("unix:{}", directory.join("socket").display()))
    }

    pub fn tcp() -> Self {
        Self::served(|_| format!("tcp://127.0.0.1:{}", free_port()))
    }

    fn served(url: impl FnOnce(&Path) -> String) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = url(directory.path());
        let server = start_server(&url, directory.path());
        Self {
            url,
            directory,
            server: Some(Mutex::new(server)),
            only_client: None,
            outlives_kills: true,
        }
    }

    pub fn config(&self) -> DriverConfig {
        DriverConfig {
            program: Some(program().to_owned()),
            token: self.server.as_ref().map(|_| TOKEN.to_owned()),
            ..DriverConfig::new(&self.url)
        }
    }

    /// Connects a new client where possible.
    pub fn client(&self) -> TestClient {
        let only = self.only_client.clone();
        only.unwrap_or_else(|| client_of(self.config()))
    }

    /// Kills the broker in the way that is worst for its clients, and makes sure that there is a next one. A
    /// `memory:` broker has no successor, so it is left alone.
    pub fn kill(&self) {
        if let Some(server) = &self.server {
            let mut server = server.lock().unwrap();
            server.kill().unwrap();
            server.wait().unwrap();
            *server = start_server(&self.url, self.directory.path());
        } else if self.outlives_kills {
            // The first client that misses the broker starts the next one. The dying one may answer once more.
            let client = self.client();
            let pid = client.broker_pid();
            kill(pid, rustix::process::Signal::KILL);
            while client.broker_pid() == pid {}
        }
    }
}

impl penstock_conformance::TestEngine for BrokerPlace {
    fn capabilities(&self) -> Capabilities {
        match self.outlives_kills {
            true => on_disk().clone(),
            false => in_memory().clone(),
        }
    }

    fn driver(&self) -> Arc<dyn Driver> {
        self.client().driver
    }

    fn can(&self, ability: Ability) -> bool {
        match ability {
            Ability::Kill => self.outlives_kills,
            Ability::SeveralClients => self.only_client.is_none(),
            Ability::SetWallClock => self.server.is_some() && has_wall_clock(),
        }
    }

    fn kill(&self) {
        Self::kill(self);
    }

    fn set_wall_clock(&self, ahead: Duration) {
        let server = self.server.as_ref().expect("a server");
        let mut server = server.lock().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        *server = server_command(&self.url, self.directory.path())
            .envs(wall_clock(&format!("+{}s", ahead.as_secs())))
            .spawn()
            .unwrap();
    }
}

impl Drop for BrokerPlace {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            let mut server = server.lock().unwrap();
            if let Some(status) = server.try_wait().unwrap() {
                eprintln!("the broker had ended by itself: {status}");
            }
            server.kill().unwrap();
            server.wait().unwrap();
        } else if self.outlives_kills
            // Without the program, no broker is started just to be stopped.
            && let Ok(driver) = connect(DriverConfig::new(&self.url))
        {
            let client = TestClient::new(driver);
            let _ = client.query(Query::Stop);
        }
    }
}

pub fn kill(pid: u64, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a broker's pid");
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Stops a process until SIGCONT, and waits until each of its threads stands still: one after another does.
pub fn suspend(pid: u64) {
    kill(pid, rustix::process::Signal::STOP);
    let stands_still = |stat: &str| {
        let state = stat.rsplit_once(") ").expect("a state").1;
        state.starts_with('T')
    };
    loop {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let mut stats = threads.map(|thread| {
            let stat = thread.unwrap().path().join("stat");
            std::fs::read_to_string(stat).unwrap()
        });
        if stats.all(|stat| stands_still(&stat)) {
            return;
        }
        std::thread::yield_now();
    }
}

pub fn start_server(listen: &str, directory: &Path) -> Child {
    server_command(listen, directory).spawn().unwrap()
}

fn server_command(listen: &str, directory: &Path) -> Command {
    let mut command = Command::new(program());
    command
        .args(["server", "--listen", listen, "--data"])
        .arg(directory.join("data"))
        .env("PENSTOCK_TOKEN", TOKEN)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Returns a port on which nothing listens.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

pub fn client_of(config: DriverConfig) -> TestClient {
    TestClient::new(connect(config).unwrap())
}
