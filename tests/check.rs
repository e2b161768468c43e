//! `ringway check`, the other commands' ends, and exit codes: the real binary, run as an operator runs it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// The binary with nothing of this process's environment that it would read.
fn ringway(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringway"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RINGWAY_") {
            command.env_remove(name);
        }
    }
    command
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(folder)
        .output()
        .expect("the binary runs")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it ends by itself")
}
fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}
fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

const GOOD: &str = r#"
[[pool]]
name = "chat"
algorithm = "least-connections"
[[pool.server]]
name = "gpu0"
url = "http://10.0.0.10:8000"
api_key_file = "keys/gpu0"
[[server]]
url = "unix:spare.sock"
"#;

#[test]
fn a_good_file_prints_as_the_effective_file_that_prints_as_itself() {
    let folder = folder(&[("etc/ringway.toml", GOOD), ("etc/keys/gpu0", "sk-secret\n")]);
    let first = ringway(folder.path(), &["check", "etc/ringway.toml"], &[]);
    assert_eq!((code(&first), stderr(&first)), (0, ""));
    let text = stdout(&first);
    for line in [
        "algorithm = \"least-connections\"",
        "queue_timeout_ms = 30000",
        "weight = 1.0",
        "max_concurrency = 32",
        "name = \"spare.sock\"",
        "access = \"off\"",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    let etc = folder.path().canonicalize().unwrap().join("etc");
    assert!(text.contains(&format!("unix:{}/spare.sock", etc.display())), "relative to the file:\n{text}");
    assert!(!text.contains("sk-secret"));

    std::fs::write(folder.path().join("effective.toml"), text).unwrap();
    let again =
        ringway(Path::new("/"), &["check", folder.path().join("effective.toml").to_str().unwrap()], &[]);
    assert_eq!((code(&again), stdout(&again), stderr(&again)), (0, text, ""), "from another folder too");
}

/// src/proto/config/README.md names every key that there is, and no other, each with its true default.
#[test]
fn the_table_of_keys_is_true() {
    fn walk(value: &toml::Value, path: &str, found: &mut BTreeMap<String, String>) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    walk(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, found);
                }
            }
            toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
                items.iter().for_each(|item| walk(item, path, found));
            }
            other => drop(found.insert(path.to_owned(), other.to_string())),
        }
    }
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/proto/config/README.md")).unwrap();
    let mut told = BTreeMap::new();
    let mut sections: Vec<String> = Vec::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let names = heading.split('`').skip(1).step_by(2);
            sections = names.map(|name| name.trim_matches(['[', ']']).to_owned()).collect();
        } else if let Some(row) = line.strip_prefix("| `") {
            let (key, rest) = row.split_once("` | ").expect("a key");
            let default = rest.split(" | ").next().unwrap();
            // A default in words has no value to compare.
            let default = default.strip_prefix('`').map_or("", |text| text.trim_end_matches('`'));
            for section in &sections {
                assert_eq!(told.insert(format!("{section}.{key}"), default.to_owned()), None, "{key} twice");
            }
        }
    }
    let plain = "[[pool]]\n[[pool.server]]\nurl = \"http://h:1\"\n[[server]]\nurl = \"http://h:2\"\n";
    let folder = folder(&[("r.toml", plain)]);
    let output = ringway(folder.path(), &["check", "r.toml"], &[]);
    let mut true_ones = BTreeMap::new();
    walk(&toml::Value::Table(stdout(&output).parse().unwrap()), "", &mut true_ones);
    for server in ["server", "pool.server"] {
        for key in ["name", "url"] {
            true_ones.insert(format!("{server}.{key}"), String::new());
        }
    }
    assert_eq!(told, true_ones);
}

#[test]
fn every_fault_comes_at_once_and_nothing_on_stdout() {
    let text = "[limits]\nconnections_max = 0\n[[pool]]\nalgorithm = \"pulsars\"\n\
                [[pool.server]]\nurl = \"https://h\"\n[[pool.server]]\nurl = \"http://h:1\"\nweigth = 2\n";
    let folder = folder(&[("r.toml", text)]);
    let output = ringway(folder.path(), &["check", "r.toml"], &[]);
    assert_eq!((code(&output), stdout(&output)), (1, ""));
    let lines: Vec<&str> = stderr(&output).lines().collect();
    assert_eq!(lines[0], "r.toml: 4 faults");
    for (line, path) in lines[1..].iter().zip([
        "limits.connections_max: 0: expected a whole number from 1 to 10000000",
        "pool[0].algorithm: \"pulsars\": ",
        "pool[0].server[0].url: \"https://h\": https is not in this version; ",
        "pool[0].server[1].weigth: 2: unknown key; nearest known key: \"weight\"",
    ]) {
        assert!(line.starts_with(path), "{line}");
    }
    assert_eq!(lines.len(), 5);
}

#[test]
fn files_that_cannot_be_read_are_wrong_configuration() {
    let folder = folder(&[("broken.toml", "a = 1\nb = [1,\n"), ("key.toml", GOOD)]);
    std::fs::write(folder.path().join("latin1.toml"), b"a = \"\xe9\"").unwrap();
    for (arguments, reason) in [
        (["check", "missing.toml"], "missing.toml: cannot be read: No such file"),
        (["check", "."], ".: cannot be read: Is a directory"),
        (["check", "latin1.toml"], "latin1.toml: byte 5: expected UTF-8 text"),
        (["check", "broken.toml"], "line 2, column 8: b = [1,: "),
        (["check", "key.toml"], "pool[0].server[0].api_key_file: "),
    ] {
        let output = ringway(folder.path(), &arguments, &[]);
        assert_eq!((code(&output), stdout(&output)), (1, ""), "{arguments:?}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
    let output = ringway(folder.path(), &["serve", "--config", "missing.toml"], &[]);
    assert_eq!(code(&output), 1);
}

#[test]
fn what_is_probably_not_meant_is_a_warning() {
    let folder = folder(&[("r.toml", "[[server]]\nurl = \"http://h:1/v1\"\n")]);
    let output = ringway(folder.path(), &["check", "r.toml"], &[]);
    assert_eq!(code(&output), 0);
    assert!(stderr(&output).starts_with("warning: server h:1: "), "{}", stderr(&output));
    assert!(stdout(&output).contains("url = \"http://h:1/v1\""));
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    // Each run has one fault left, so that it ends; what is not among the faults was beaten.
    let folder = folder(&[("r.toml", "[runtime]\nspin_us = -1\n[[server]]\nurl = \"http://h:1\"\n")]);
    let config = ("RINGWAY_CONFIG", "r.toml");
    let run = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = ringway(folder.path(), &[&["serve"], arguments].concat(), variables);
        assert_eq!((code(&output), stdout(&output)), (1, ""));
        stderr(&output).lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    let range = "expected a whole number from 0 to 100000";
    assert_eq!(run(&[], &[config]), [format!("runtime.spin_us: -1: {range}")]);
    assert_eq!(
        run(&[], &[config, ("RINGWAY_SPIN_US", "-2")]),
        [format!("--spin-us (or RINGWAY_SPIN_US): -2: {range}")]
    );
    assert_eq!(
        run(&["--spin-us", "-3"], &[config, ("RINGWAY_SPIN_US", "-2")]),
        [format!("--spin-us (or RINGWAY_SPIN_US): -3: {range}")]
    );
    let beaten = run(
        &["--spin-us", "5", "--config", "r.toml"],
        &[("RINGWAY_CONFIG", "none"), ("RINGWAY_DRIVER", "x")],
    );
    assert!(
        beaten.len() == 1 && beaten[0].starts_with("--driver (or RINGWAY_DRIVER): \"x\": "),
        "{beaten:?}"
    );
    // Lists in the environment are separated by commas.
    let lists =
        run(&[], &[("RINGWAY_BACKEND", "http://h:1,nowhere"), ("RINGWAY_LISTEN", "127.0.0.1:1,127.0.0.1:1")]);
    assert_eq!(lists.len(), 2, "{lists:?}");
    assert!(lists[0].starts_with("--backend (or RINGWAY_BACKEND): \"nowhere\": "), "{lists:?}");
    assert!(lists[1].starts_with("--listen (or RINGWAY_LISTEN): \"127.0.0.1:1\": "), "{lists:?}");
    assert!(run(&[], &[])[0].contains("or --backend URL"), "no server at all");
}

#[test]
fn usage_faults_end_with_one() {
    let here = Path::new(".");
    for arguments in [
        &[][..],
        &["serv"],
        &["check"],
        &["check", "a", "b"],
        &["serve", "--bakend", "http://h"],
        &["serve", "--backend"],
        &["serve", "--spin-us", "many"],
        &["engine", "--listen", "localhost"],
        &["demo", "--requests", "none"],
        &["--verbose"],
    ] {
        let output = ringway(here, arguments, &[]);
        assert_eq!(code(&output), 1, "{arguments:?}");
        assert!(stdout(&output).is_empty() && !stderr(&output).is_empty(), "{arguments:?}");
    }
    let near = ringway(here, &["serve", "--bakend", "http://h"], &[]);
    assert!(stderr(&near).contains("--backend"), "{}", stderr(&near));
}

#[test]
fn commands_of_later_versions_say_so() {
    for arguments in [&["doctor"][..], &["doctor", "--help"]] {
        let output = ringway(Path::new("."), arguments, &[]);
        assert_eq!((code(&output), stdout(&output)), (1, ""), "{arguments:?}");
        assert!(
            stderr(&output).contains(&format!("{}: not in this version", arguments[0])),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn help_is_an_answer_and_tells_the_exit_codes() {
    let help = ringway(Path::new("."), &["--help"], &[]);
    assert_eq!((code(&help), stderr(&help)), (0, ""));
    for word in [
        "serve",
        "check",
        "demo",
        "engine",
        "stargate",
        "status",
        "drain",
        "doctor",
        "Exit codes",
        "Examples",
    ] {
        assert!(stdout(&help).contains(word), "{word}");
    }
    for (command, words) in [
        ("serve", &["RINGWAY_BACKEND", "--max-concurrency", "Exit codes", "then `ready`", "Examples"][..]),
        ("check", &["effective configuration", "path: value: what was expected", "Example"]),
        ("engine", &["without a model", "--decode-tps", "Faults:", "Examples"]),
        ("demo", &["--requests", "Examples"]),
        ("status", &["RINGWAY_ADMIN", "--json", "Exit codes"]),
        (
            "stargate",
            &[
                "STARGATE_PROXY_MAX_CONNECT_RETRIES",
                "--lb-config-path",
                "--backend",
                "Exit codes",
                "Examples",
            ],
        ),
        ("drain", &["RINGWAY_ADMIN", "--timeout-ms", "Exit codes", "weight"]),
    ] {
        let help = ringway(Path::new("."), &[command, "--help"], &[]);
        assert_eq!(code(&help), 0);
        for word in words {
            assert!(stdout(&help).contains(word), "{command}: {word}");
        }
    }
    let spelt_out = ringway(Path::new("."), &["help"], &[]);
    assert_eq!((code(&spelt_out), stdout(&spelt_out)), (0, stdout(&help)));
    let of_one = ringway(Path::new("."), &["help", "drain"], &[]);
    assert!(code(&of_one) == 0 && stdout(&of_one).contains("--timeout-ms"), "{}", stdout(&of_one));
    let version = ringway(Path::new("."), &["--version"], &[]);
    assert_eq!((code(&version), stdout(&version)), (0, concat!("ringway ", env!("CARGO_PKG_VERSION"), "\n")));
}

#[test]
fn an_occupied_port_ends_with_two_and_says_what_to_do() {
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let free = "127.0.0.1:0";
    for flags in [["--listen", &address, "--admin", free], ["--admin", &address, "--listen", free]] {
        let arguments = [&["serve", "--backend", "http://127.0.0.1:9"][..], &flags].concat();
        let output = ringway(Path::new("."), &arguments, &[]);
        assert_eq!((code(&output), stdout(&output)), (2, ""), "{}", stderr(&output));
        let text = stderr(&output);
        assert!(text.contains(&address) && text.contains("choose another port"), "{text}");
    }
}
