//! Implements `penstock._core`, which only converts between Rust and Python. python/penstock/_core.pyi lists
//! its content. Importing it starts no thread, opens no file and installs no handler.

mod answers;
mod child;
mod client;
mod consumer;
mod errors;
mod failed;
mod forks;
mod graph;
mod heap;
mod ids;
mod immortals;
mod loan;
mod options;
mod port;
mod progress;
mod read_ahead;
mod requests;
mod schedules;
mod values;
mod wait;
mod workflows;

// The interpreter lock prevents a fork while another thread holds one of our locks. A build without that lock
// needs another way to prevent it first.
#[pyo3::pymodule(gil_used = true)]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::child::{ChildLink, SlotLink};
    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::consumer::Consumer;
    #[pymodule_export]
    use crate::forks::{Role, serve_forks};
    #[pymodule_export]
    use crate::graph::Graph;
    #[pymodule_export]
    use crate::heap::{
        WrittenPages, collapse_heap, fill_holes, flush_c_output, gather_arenas, has_one_thread,
    };
    #[pymodule_export]
    use crate::immortals::make_immortal;
    #[pymodule_export]
    use crate::loan::Loan;
    #[pymodule_export]
    use crate::options::Options;
    #[pymodule_export]
    use crate::port::Port;
    #[pymodule_export]
    use crate::schedules::{Timing, declare_schedule};
    #[pymodule_export]
    use crate::workflows::draw_workflow;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
