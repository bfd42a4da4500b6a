//! Marks places in the product where the simulator may deliberately make something go wrong.
//!
//! [`planted!`] marks a planted bug; [`PLANTS`] is the table of them. One at a time is chosen at run time, and
//! the simulator must catch it: a simulator that misses one is too weak. [`perhaps!`] marks a decision that is
//! allowed at any time but rare by nature, such as beginning a new segment. The simulator makes it frequent.
//!
//! Without the feature `on`, both are the constant `false`, and nothing else of this crate is compiled.

#[cfg(feature = "on")]
mod points;
#[cfg(feature = "on")]
mod table;

#[cfg(feature = "on")]
pub use points::{Points, is_found_by, is_likely, is_planted, plant, point};
#[cfg(feature = "on")]
pub use table::{Finder, PLANTS, POINTS, Plant};

// Profiles for the simulator and for tests have debug assertions; release builds for users do not.
#[cfg(all(feature = "on", not(debug_assertions)))]
compile_error!("planted bugs must not be built into a release");

/// True if this bug is the one that is planted now.
#[cfg(feature = "on")]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        $crate::is_planted(const { $crate::plant($name) })
    };
}

#[cfg(not(feature = "on"))]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        false
    };
}

/// True now and then, as the simulation's seed decides.
#[cfg(feature = "on")]
#[macro_export]
macro_rules! perhaps {
    ($name:literal) => {
        $crate::is_likely(const { $crate::point($name) })
    };
}

#[cfg(not(feature = "on"))]
#[macro_export]
macro_rules! perhaps {
    ($name:literal) => {
        false
    };
}
