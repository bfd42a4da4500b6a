//! Places in the product where the simulator may make something go wrong on purpose.
//!
//! [`planted!`] marks a bug that is planted there; the table of them is [`PLANTS`]. One at a time is
//! chosen at run time, and the simulator must catch it: a simulator that misses one is too weak.
//! [`perhaps!`] marks a decision that is lawful at any time and rare by nature, such as beginning a
//! new segment: the simulator makes it frequent.
//!
//! Without the feature `on` both are the constant `false`, and nothing of this is compiled.

#[cfg(feature = "on")]
mod points;
#[cfg(feature = "on")]
mod table;

#[cfg(feature = "on")]
pub use points::{Points, is_found_by, is_likely, is_planted, plant, point};
#[cfg(feature = "on")]
pub use table::{Finder, PLANTS, POINTS, Plant};

// Profiles for the simulator and for tests have debug assertions; what users are given has not.
#[cfg(all(feature = "on", not(debug_assertions)))]
compile_error!("planted bugs must not be built into a release");

/// True when this bug of the table is the one that is planted now.
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

/// True now and then, as the seed of the simulation has it.
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
