//! The journal's promises.

mod opening;
mod support;
