//! Keeps an output of `replay` beside the others of its kind: command and commit first, then the tables.
//!
//! *Invariant*: a record is never overwritten.
//! *Errors*: the file, and the system's reason.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use crate::clock;
use crate::record;

/// Writes `text` to a new file at `path`, whose directory is made if it is not there.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(failed)?;
    }
    let title = path.file_stem().unwrap_or_default().to_string_lossy().replace('-', " ");
    let head = format!(
        "# Replay: {title}\n\n- date: {} (UTC)\n- commit: {}\n- command: `{}`\n\n",
        clock::date(clock::unix_s()),
        record::commit(),
        record::command_line(std::env::args()),
    );
    let mut file = fs::File::create_new(path).map_err(failed)?;
    file.write_all((head + text).as_bytes()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_never_overwritten() {
        let directory = std::env::temp_dir().join(format!("ringway-perf-replay-{}", std::process::id()));
        let path = directory.join("hit-rates.md");
        write(&path, "table\n").expect("writable");
        let text = fs::read_to_string(&path).expect("written");
        assert!(text.starts_with("# Replay: hit rates\n\n- date: 2"), "{text}");
        assert!(text.contains("\n- commit: ") && text.ends_with("\n\ntable\n"), "{text}");
        let fault = write(&path, "other\n").expect_err("it exists");
        assert!(fault.contains("hit-rates.md: "), "{fault}");
        assert_eq!(fs::read_to_string(&path).expect("still there"), text);
        fs::remove_dir_all(&directory).expect("ours");
    }
}
