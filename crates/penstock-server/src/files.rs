//! Number of clients that this process has room for: each takes a file descriptor.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Default maximum of clients: no broker needs more unless configured otherwise.
const MOST_BY_DEFAULT: u64 = 50_000;

/// Maximum of closed connections that stay open briefly, so that their clients can read the reason.
pub(crate) const MAX_CLOSING: usize = 64;

/// Files for the journal, the listeners, the process itself and [`MAX_CLOSING`] connections.
fn reserved(files: u64) -> u64 {
    let own = (files / 8).clamp(48, 512);
    own + MAX_CLOSING as u64
}

/// Raises the limit of open files as far as the system allows; returns the limit.
pub(crate) fn raise_limit() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum,
        Err(error) => {
            tracing::debug!("the limit of open files could not be raised: {error}");
            current
        }
    }
    .unwrap_or(u64::MAX)
}

/// Returns the maximum number of clients; fails with the number that would fit.
pub(crate) fn connections(wanted: Option<usize>, files: u64) -> Result<usize, u64> {
    let room = files.saturating_sub(reserved(files));
    match wanted {
        None => Ok(room.clamp(1, MOST_BY_DEFAULT) as usize),
        Some(wanted) if wanted as u64 <= room => Ok(wanted),
        Some(_) => Err(room),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_kept_for_the_journal_whatever_the_limit() {
        assert_eq!(connections(None, 256), Ok(144));
        assert_eq!(connections(None, 1024), Ok(832));
        assert_eq!(connections(None, 20_000), Ok(19_424));
        assert_eq!(connections(None, u64::MAX), Ok(50_000));
        assert_eq!(connections(Some(100_000), 1 << 20), Ok(100_000));
        assert_eq!(connections(Some(145), 256), Err(144));
    }
}
