//! Checks the crates' dependencies on each other against their manifests and the map.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Returns the direct dependencies of each crate within this workspace, without those of its tests.
fn direct() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |package: &Value| {
        let all = package["dependencies"].as_array().unwrap();
        let ours = all
            .iter()
            .filter(|one| one["kind"].is_null() && !one["path"].is_null());
        let names = ours.map(|one| text(&one["name"])).collect();
        (text(&package["name"]), names)
    };
    let packages = metadata["packages"].as_array().unwrap();
    packages.iter().map(of).collect()
}

/// Returns the dependencies of a crate, direct and indirect.
fn whole(name: &str) -> BTreeSet<String> {
    let direct = direct();
    let mut found = BTreeSet::new();
    let mut open = vec![name.to_owned()];
    while let Some(name) = open.pop() {
        for dependency in &direct[&name] {
            if found.insert(dependency.clone()) {
                open.push(dependency.clone());
            }
        }
    }
    found
}

#[test]
fn neither_the_trait_nor_a_client_is_built_from_a_broker_or_a_journal() {
    for client in ["penstock-driver", "penstock-local", "penstock-python"] {
        let tree = whole(client);
        assert!(tree.contains("penstock-message"), "{client}: {tree:?}");
        for engine in ["penstock-broker", "penstock-journal", "penstock-server"] {
            assert!(!tree.contains(engine), "{client} is built from {engine}");
        }
    }
    let program = whole("penstock-cli");
    assert!(program.contains("penstock-journal"), "{program:?}");
}

#[test]
fn each_crate_is_built_only_from_those_above_it_on_the_map() {
    let map = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let map = fs::read_to_string(map).unwrap();
    let row = |line: &str| {
        let (name, _) = line.strip_prefix("| `crates/")?.split_once('`')?;
        Some(name.to_owned())
    };
    let order: Vec<String> = map.lines().filter_map(row).collect();
    for (name, dependencies) in direct() {
        let Some(place) = order.iter().position(|one| *one == name) else {
            assert!(!name.starts_with("penstock-"), "{name} is not on the map");
            continue;
        };
        for dependency in dependencies {
            assert!(
                order[..place].contains(&dependency),
                "{name} is built from {dependency}, which is not above it on the map"
            );
        }
    }
}
