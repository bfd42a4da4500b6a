use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::DriverError;

/// Broker that a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerUrl {
    /// `local:PATH`: the broker of a directory, started if it is not running.
    Local(PathBuf),
    /// `unix:PATH` or `penstock+unix:PATH`: the broker listening on this socket.
    Unix(PathBuf),
    /// `tcp://HOST:PORT`.
    Tcp { host: String, port: u16 },
    /// `memory:NAME`: a test double, private to each client. The name is for people.
    Memory(String),
}

/// Default port of a server.
pub const DEFAULT_PORT: u16 = 5670;

impl FromStr for BrokerUrl {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self, DriverError> {
        let wrong = |why: &str| {
            DriverError::invalid(format!(
                "the broker URL {url:?} {why}; give local:PATH, unix:PATH or tcp://HOST:PORT"
            ))
        };
        let (scheme, rest) = url.split_once(':').ok_or_else(|| wrong("has no scheme"))?;
        // unix:///run/x and unix:/run/x are the same; a path never needs two slashes before it.
        let path = rest.strip_prefix("//").unwrap_or(rest);
        match scheme {
            // In any other URL, `rel` of local://rel/dir would be a host.
            "local" | "unix" | "penstock+unix"
                if rest.starts_with("//") && !path.is_empty() && !path.starts_with('/') =>
            {
                Err(wrong("has // before a path that does not begin with /"))
            }
            "local" | "unix" | "penstock+unix" if path.is_empty() => Err(wrong("has no path")),
            "local" => Ok(Self::Local(path.into())),
            "unix" | "penstock+unix" => Ok(Self::Unix(path.into())),
            "memory" => Ok(Self::Memory(path.to_owned())),
            "tcp" => {
                let place = rest
                    .strip_prefix("//")
                    .ok_or_else(|| wrong("needs // before the host"))?;
                // Don't repeat any part of it: the error may be logged.
                if place.contains('@') {
                    return Err(DriverError::invalid(
                        "the URL of a server must not contain a token: set PENSTOCK_TOKEN, and give tcp://HOST:PORT".to_owned(),
                    ));
                }
                let place = place.strip_suffix('/').unwrap_or(place);
                // A bare IPv6 address has its colons in brackets, as in any URL.
                let (host, port) = match place.rsplit_once(':') {
                    Some((host, port)) if !port.ends_with(']') => {
                        let port = port
                            .parse()
                            .map_err(|_| wrong("has a port that is not a number up to 65535"))?;
                        (host, port)
                    }
                    _ => (place, DEFAULT_PORT),
                };
                let host = host.trim_start_matches('[').trim_end_matches(']');
                if host.is_empty() {
                    return Err(wrong("has no host"));
                }
                Ok(Self::Tcp {
                    host: host.to_owned(),
                    port,
                })
            }
            _ => Err(wrong("has an unknown scheme")),
        }
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => write!(out, "local:{}", path.display()),
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(out, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(out, "tcp://{host}:{port}"),
            Self::Memory(name) => write!(out, "memory:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_reads_as_written_or_says_what_is_wrong() {
        let check = |url: &str, expected: &str| {
            let shown = match url.parse::<BrokerUrl>() {
                Ok(address) => address.to_string(),
                Err(error) => error.to_string(),
            };
            assert!(shown.contains(expected), "{url}: {shown}");
            assert!(!shown.contains("hunter2"), "{shown}");
        };
        check("local:.penstock", "local:.penstock");
        check("local:/var/lib/shop", "local:/var/lib/shop");
        check("penstock+unix:///run/p.sock", "unix:/run/p.sock");
        check("unix:p.sock", "unix:p.sock");
        check("tcp://broker", "tcp://broker:5670");
        check("tcp://broker:1234/", "tcp://broker:1234");
        check("tcp://[::1]:1234", "tcp://[::1]:1234");
        check("tcp://[::1]", "tcp://[::1]:5670");
        check("memory:", "memory:");
        check("local:///var/lib/shop", "local:/var/lib/shop");
        check("local:", "has no path");
        check("local://", "has no path");
        check("local://shop/data", "does not begin with /");
        check(
            "tcp://:hunter2@broker",
            "must not contain a token: set PENSTOCK_TOKEN",
        );
        check("tcp://:1", "has no host");
        check("tcp:broker", "needs //");
        check("tcp://broker:99999", "up to 65535");
        check("amqp://rabbit", "unknown scheme");
        check("broker", "has no scheme");
    }
}
