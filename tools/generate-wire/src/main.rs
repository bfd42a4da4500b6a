//! Writes crates/penstock-wire/src/generated.rs from proto/penstock.proto.
//!
//!     make wire                               writes the file, and notes the sources that it agrees with
//!     cargo run -p generate-wire -- --check   checks that the file agrees, and writes nothing
//!
//! The result is committed, so that building penstock needs no protobuf compiler.

mod encoded;
mod shapes;
mod split;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

const HEADER: &str =
    "// Written by tools/generate-wire from proto/penstock.proto; do not edit.\n\n";

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = root.join("crates/penstock-wire/src/generated.rs");
    let generated = generate(&root.join("proto"))?;
    match std::env::args().nth(1).as_deref() {
        None => std::fs::write(target, generated)?,
        Some("--check") => {
            if std::fs::read_to_string(target)? != generated {
                eprintln!(
                    "crates/penstock-wire/src/generated.rs does not agree with proto/penstock.proto."
                );
                eprintln!("Run: make wire");
                return Ok(ExitCode::FAILURE);
            }
        }
        Some(other) => {
            eprintln!("unknown argument {other:?}; there is only --check");
            return Ok(ExitCode::from(2));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn generate(protos: &Path) -> Result<String, Box<dyn Error>> {
    let mut files = protox::compile(["penstock.proto"], [protos])?;
    let shapes = shapes::of("ToBroker", &split::MESSAGE, &encoded::TRANSACTIONS, &files)?;
    split::MESSAGE.apply(&mut files)?;
    encoded::TRANSACTIONS.apply(&mut files)?;
    let module = prost_build::Module::from_protobuf_package_name("penstock.v1");
    let requests = files
        .file
        .into_iter()
        .map(|file| (module.clone(), file))
        .collect();
    let mut config = prost_build::Config::new();
    // Share slices of the frame instead of copying them.
    config.bytes(["."]);
    // Few answers are a status, but unboxed, every answer would have room for one.
    config.boxed(".penstock.v1.Status.others");
    // Few operations are a schedule, but unboxed, every operation would have room for one.
    config.boxed(".penstock.v1.Op.op.schedule");
    // Few publishes have a key, but unboxed, every operation would take half as much memory again.
    config.boxed(".penstock.v1.Publish.unless_key");
    config.boxed(".penstock.v1.Publish.claim");
    // Written by hand, and composed of its two parts.
    let split = split::MESSAGE.message;
    config.extern_path(
        format!(".penstock.v1.{split}"),
        format!("crate::message::{split}"),
    );
    let mut modules = config.generate(requests)?;
    let code = modules
        .remove(&module)
        .ok_or("prost-build gave no module for penstock.v1")?;
    Ok(HEADER.to_owned() + &code + &shapes)
}
