//! Rules about the source that no compiler checks: which folder may use which, what every file begins with, what must not
//! be left behind.

use std::fs;
use std::path::{Path, PathBuf};

/// Folder or file under `src`, and the rooms of the crate it may name. The table of ARCHITECTURE.md.
const MAY_USE: &[(&str, &[&str])] = &[
    ("limits", &[]),
    ("clock", &[]),
    ("proto", &["limits", "clock::Nanos", "proto"]),
    ("mesh", &["limits", "clock::Nanos", "proto", "mesh"]),
    ("runtime", &["runtime"]),
    ("shard", &["limits", "clock", "proto", "mesh", "runtime", "shard"]),
    ("control", &["limits", "clock", "proto", "mesh", "runtime", "control"]),
    ("engine", &["limits", "clock", "proto", "runtime", "engine", "cli"]),
    ("demo", &["limits", "clock", "proto", "runtime", "engine", "demo", "cli"]),
    ("log", &["proto"]),
    ("cli", &["limits", "proto"]),
    ("operator", &["cli", "demo::client"]),
    ("serve", &["limits", "clock", "proto", "mesh", "runtime", "shard", "control", "cli", "log"]),
];
/// Files that join the rooms.
const FREE: &[&str] = &["lib", "main"];
/// A file longer than this wants a second noun. Tests beside the code do not count.
const LINES_MAX: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "{}: no .{extension} files; is the path right?", dir.display());
    found
}

/// The first part of a path under `src`, without `.rs`.
fn room(path: &Path) -> String {
    let inside = path.strip_prefix(root().join("src")).unwrap();
    let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_string()
}

/// Rooms that `text` names by `crate::…`, `use crate::{…}` included.
fn named(text: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices("crate::") {
            let rest = &line[at + "crate::".len()..];
            match rest.strip_prefix('{') {
                Some(list) => {
                    let list = list.split('}').next().unwrap();
                    rooms.extend(list.split(',').map(|item| item.trim().to_string()));
                }
                None => rooms.push(rest.trim_end_matches(';').to_string()),
            }
        }
    }
    rooms
}

fn allowed(name: &str, allowed: &[&str]) -> bool {
    allowed.iter().any(|room| {
        name.strip_prefix(room)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

#[test]
fn folders_use_only_what_the_table_allows() {
    let mut faults = Vec::new();
    for path in files(&root().join("src"), "rs") {
        let room = room(&path);
        if FREE.contains(&room.as_str()) {
            continue;
        }
        let Some((_, may)) = MAY_USE.iter().find(|(name, _)| *name == room) else {
            faults.push(format!("{}: `{room}` is not in the table", path.display()));
            continue;
        };
        for name in named(&fs::read_to_string(&path).unwrap()) {
            if !allowed(&name, may) {
                faults.push(format!("{}: `{room}` may not use crate::{name}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_table_check_sees_what_it_should() {
    assert_eq!(named("use crate::{clock, shard::x};"), ["clock", "shard::x"]);
    assert_eq!(named("// crate::shard\nlet a = crate::mesh::build(1);"), ["mesh::build(1)"]);
    assert!(allowed("clock::Nanos", &["clock::Nanos"]) && !allowed("clock::Clock", &["clock::Nanos"]));
    assert!(!allowed("shardling", &["shard"]));
}

#[test]
fn every_file_says_what_it_does() {
    for path in files(&root().join("src"), "rs") {
        if path.file_name().is_some_and(|name| name == "tests.rs")
            || path.to_str().unwrap().contains("/tests/")
        {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("//! "),
            "{}: begins without a `//!` line that says what it does",
            path.display()
        );
    }
}

#[test]
fn nothing_is_left_unfinished() {
    let marks = ["FIXME", "XXX", "HACK", "(being written)", "#[ignore"];
    for dir in ["src", "perf/src", "tests"] {
        for path in files(&root().join(dir), "rs") {
            if path.file_name().is_some_and(|name| name == "tidy.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for mark in marks {
                assert!(!text.contains(mark), "{}: `{mark}`", path.display());
            }
        }
    }
}

#[test]
fn long_files_find_a_second_noun() {
    for path in files(&root().join("src"), "rs") {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("\n#[cfg(test)]").next().unwrap();
        let lines = code.lines().count();
        assert!(
            lines <= LINES_MAX || path.ends_with("tests.rs"),
            "{}: {lines} lines of code, over {LINES_MAX}: which second noun is in there?",
            path.display()
        );
    }
}

#[test]
fn architecture_names_every_room_and_every_dependency() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for (room, _) in MAY_USE {
        assert!(text.contains(&format!("`{room}")), "ARCHITECTURE.md does not name `{room}`");
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let manifest: toml::Table = toml::from_str(&manifest).unwrap();
    for table in ["dependencies", "dev-dependencies"] {
        for (name, value) in manifest[table].as_table().unwrap() {
            let package = value.get("package").and_then(|p| p.as_str()).unwrap_or(name);
            assert!(
                text.contains(&format!("`{package}`")),
                "ARCHITECTURE.md gives no reason for `{package}`"
            );
        }
    }
    let lines = text.lines().count();
    assert!(lines <= 150, "ARCHITECTURE.md has {lines} lines; 150 are enough for a bird's-eye view");
}
