//! Refuses a build of the package that would lack the `penstock` program, or have that of another version.
//!
//! maturin builds the extension module alone. The build backend builds the program first, and passes on
//! its version; a bare `maturin build` would make a wheel in which no command and no `local:` works.

use std::env;

const PROGRAM: &str = "PENSTOCK_PROGRAM_VERSION";
/// Set by maturin, and not by `cargo check`, `clippy` or `doc`.
const BY_MATURIN: &str = "PYO3_BUILD_EXTENSION_MODULE";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={PROGRAM}");
    println!("cargo::rerun-if-env-changed={BY_MATURIN}");
    if env::var_os(BY_MATURIN).is_none() {
        return;
    }
    let package = env!("CARGO_PKG_VERSION");
    match env::var(PROGRAM) {
        Err(_) => println!(
            "cargo::error=maturin alone would build a package without the penstock program: \
             run `pip wheel .`, `make wheels`, or `pip install --editable .`"
        ),
        Ok(program) if program != package => println!(
            "cargo::error=the package is {package}, and the penstock program for it is {program}: build both again"
        ),
        Ok(_) => {}
    }
}
