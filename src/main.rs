//! The `ringway` binary.

use std::process::ExitCode;

use ringway::cli::{self, Cli, Command, exit};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let command = match Cli::from_process() {
        Ok(cli) => cli.command,
        Err(code) => return ExitCode::from(code),
    };
    let code = match &command {
        Command::Serve(args) => match args.settings() {
            Ok(settings) => ringway::serve::serve(&settings),
            Err(text) => {
                eprintln!("{text}");
                exit::WRONG
            }
        },
        Command::Check(args) => cli::check(args),
        Command::Demo(args) => ringway::demo::run(args),
        Command::Engine(args) => ringway::engine::run(args),
        Command::Status(args) => ringway::operator::status(args),
        Command::Drain(args) => ringway::operator::drain(args),
        Command::Stargate(args) => match args.settings() {
            Ok(settings) => ringway::serve::stargate(&settings, args),
            Err(text) => {
                eprintln!("{text}");
                exit::WRONG
            }
        },
        Command::Doctor(_) => cli::not_in_this_version(&command),
    };
    ExitCode::from(code)
}
