//! Type names that are unique across the crates, so that a search finds one thing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Names that several crates may use, each with the reason.
const SHARED: [(&str, &str); 10] = [
    ("Client", "Python's, by its public name; the simulator's"),
    ("Consumer", "Python's, by its public name; the simulator's"),
    ("Desk", "the worker's; the simulator's tests"),
    ("End", "the worker's; the simulator's model"),
    (
        "Life",
        "a child's in the worker; a broker's in the simulator",
    ),
    (
        "Link",
        "a child's in the worker; a network's in the simulator",
    ),
    ("Message", "the noun, and its form in the protocol"),
    (
        "Outcome",
        "a run's, in penstock-jobs; a seed's in the simulator",
    ),
    ("Pool", "the worker's, and its stand-in in the simulator"),
    ("Said", "the zygote's; the simulator's clients'"),
];

/// Returns the Rust files of a crate, apart from generated ones.
fn rust_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                rust_files(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_name().is_some_and(|name| name != "generated.rs")
        {
            found.push(path);
        }
    }
}

/// Returns the type that a line declares. Associated types are indented, and belong to their traits.
fn declared(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let is_indented = code.len() < line.len();
    let code = match code.strip_prefix("pub") {
        Some(code) if code.starts_with('(') => code.split_once(')')?.1.trim_start(),
        Some(code) => code.trim_start(),
        None => code,
    };
    let code = code.strip_prefix("unsafe ").unwrap_or(code);
    let (keyword, code) = code.split_once(' ')?;
    let is_declaration = matches!(keyword, "struct" | "enum" | "trait" | "union");
    let is_alias = keyword == "type" && !is_indented;
    let end = code.find(|c: char| !c.is_alphanumeric() && c != '_');
    let name = &code[..end.unwrap_or(code.len())];
    ((is_declaration || is_alias) && !name.is_empty()).then_some(name)
}

#[test]
fn declarations_are_found() {
    for (line, name) in [
        ("pub struct Journal {", Some("Journal")),
        ("    pub(crate) enum Space<T> {", Some("Space")),
        ("trait Field: Sized {", Some("Field")),
        ("pub unsafe trait Plain {}", Some("Plain")),
        ("type Keep<'a> = dyn Fn();", Some("Keep")),
        ("    type Item = u8;", None),
        ("// struct Journal", None),
        ("let structure = 1;", None),
    ] {
        assert_eq!(declared(line), name, "{line}");
    }
}

#[test]
fn no_two_crates_have_a_type_of_one_name() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut declaring: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in fs::read_dir(crates).unwrap() {
        let directory = entry.unwrap().path();
        let name = directory
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let mut files = Vec::new();
        rust_files(&directory, &mut files);
        for file in files {
            let text = fs::read_to_string(file).unwrap();
            for declared in text.lines().filter_map(declared) {
                let crates = declaring.entry(declared.to_owned()).or_default();
                crates.insert(name.clone());
            }
        }
    }
    assert!(declaring.len() > 500, "{} types", declaring.len());
    let listed: BTreeSet<&str> = SHARED.iter().map(|(name, _)| *name).collect();
    let shared: Vec<_> = declaring
        .iter()
        .filter(|(name, crates)| crates.len() > 1 && !listed.contains(name.as_str()))
        .collect();
    assert!(
        shared.is_empty(),
        "types of one name in several crates; rename the less fitting one: {shared:#?}"
    );
    for name in listed {
        assert!(declaring.contains_key(name), "no crate has a type {name}");
    }
}
