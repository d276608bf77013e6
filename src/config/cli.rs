//! The command line, as words: what is asked for, not how it is done.
//! To add a command: a variant of `Words` with its doc comment (it is the help), a variant of
//! [`Command`], and its arm in `From`.

use std::num::NonZeroU16;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Where the config is looked for when nothing else is said.
pub const CONFIG_DEFAULT: &str = "/etc/weir/weir.yaml";

/// What `weir` was asked to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Serve, with this config file.
    Run {
        /// The config file.
        config: PathBuf,
    },
    /// Say what is wrong with a config file.
    Check {
        /// The config file.
        config: PathBuf,
        /// What to print when nothing is.
        print: Print,
    },
    /// Serve a fleet of simulated engines.
    Demo {
        /// How many engines.
        engines: u16,
        /// The port clients connect to.
        port: u16,
        /// The model the engines say they serve.
        model: String,
    },
}

/// What `weir check` prints of a good config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Print {
    /// That it is good, and the gist of it.
    Summary,
    /// Every key with its value, secrets hidden.
    Config,
}

impl Command {
    /// Reads the process's arguments. On `--help`, `--version` and mistakes it prints and ends the
    /// process, with status 2 for a mistake.
    pub fn from_arguments() -> Self {
        Line::parse().into()
    }

    /// The same for given arguments, the program's name first; the error is what to print.
    pub fn parse<I, T>(arguments: I) -> Result<Self, clap::Error>
    where
        I: IntoIterator<Item = T>,
        T: Into<std::ffi::OsString> + Clone,
    {
        Line::try_parse_from(arguments).map(Self::from)
    }
}

/// An edge proxy for fleets of vLLM engines.
///
/// Weir takes requests in OpenAI's and Anthropic's form, chooses the engine that will answer
/// soonest, and streams the answer back as it comes.
#[derive(Debug, Parser)]
#[command(
    name = "weir",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "\
First steps:
  weir demo                         three simulated engines behind Weir, no GPU needed
  weir --config weir.yaml           serve
  weir check weir.yaml              say what is wrong with a config, with lines and advice

While it runs, a changed config file is taken over by itself. SIGHUP does so at once, SIGTERM lets
running requests finish. Every key is explained in docs/configuration.md."
)]
struct Line {
    #[command(subcommand)]
    words: Option<Words>,

    #[command(flatten)]
    run: RunWords,
}

#[derive(Args, Debug)]
struct RunWords {
    /// The config file to serve with
    #[arg(short, long, value_name = "FILE", env = "WEIR_CONFIG", default_value = CONFIG_DEFAULT)]
    config: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Words {
    /// Say everything that is wrong with a config file; status 0 when nothing is, else 1
    Check {
        /// The config file
        #[arg(value_name = "FILE", env = "WEIR_CONFIG", default_value = CONFIG_DEFAULT)]
        file: PathBuf,
        /// Print the effective config: every key with its value, secrets hidden
        #[arg(long)]
        print: bool,
    },
    /// Serve simulated engines, to try Weir without a GPU
    Demo {
        /// How many engines
        #[arg(long, value_name = "NUMBER", default_value = "3", value_parser = engines)]
        engines: u16,
        /// The port on 127.0.0.1 that clients connect to
        #[arg(long, value_name = "PORT", default_value = "8080")]
        port: NonZeroU16,
        /// The model the engines say they serve
        #[arg(long, value_name = "NAME", default_value = "demo")]
        model: String,
    },
}

/// Most simulated engines of one demo.
const ENGINES_MAX: u16 = 64;

fn engines(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(engines) if (1..=ENGINES_MAX).contains(&engines) => Ok(engines),
        _ => Err(format!("not a number from 1 to {ENGINES_MAX}")),
    }
}

impl From<Line> for Command {
    fn from(line: Line) -> Self {
        match line.words {
            None => Self::Run { config: line.run.config },
            Some(Words::Check { file, print }) => Self::Check {
                config: file,
                print: if print { Print::Config } else { Print::Summary },
            },
            Some(Words::Demo { engines, port, model }) => {
                Self::Demo { engines, port: port.get(), model }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Command {
        Command::parse(line.split(' ')).unwrap()
    }

    fn refused(line: &str) -> clap::Error {
        Command::parse(line.split(' ')).unwrap_err()
    }

    #[test]
    fn the_words_are_sound() {
        Line::command().debug_assert();
    }

    #[test]
    fn every_command_is_understood() {
        let run = |path: &str| Command::Run { config: path.into() };
        assert_eq!(parse("weir"), run(CONFIG_DEFAULT));
        assert_eq!(parse("weir -c a.yaml"), run("a.yaml"));
        assert_eq!(parse("weir --config a.yaml"), run("a.yaml"));
        assert_eq!(parse("weir --config=a.yaml"), run("a.yaml"));
        let check = |path: &str, print| Command::Check { config: path.into(), print };
        assert_eq!(parse("weir check"), check(CONFIG_DEFAULT, Print::Summary));
        assert_eq!(parse("weir check a.yaml"), check("a.yaml", Print::Summary));
        assert_eq!(parse("weir check --print a.yaml"), check("a.yaml", Print::Config));
        let demo =
            |engines, port, model: &str| Command::Demo { engines, port, model: model.into() };
        assert_eq!(parse("weir demo"), demo(3, 8080, "demo"));
        assert_eq!(parse("weir demo --engines 5 --port 1 --model m"), demo(5, 1, "m"));
    }

    #[test]
    fn a_mistake_ends_with_status_two() {
        for line in [
            "weir chekc",
            "weir --confg a",
            "weir demo --engines 0",
            "weir demo --engines 65",
            "weir demo --port 70000",
            "weir a.yaml",
            "weir --config a.yaml check",
        ] {
            assert_eq!(refused(line).exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn help_shows_the_first_steps() {
        let help = refused("weir --help");
        assert_eq!(help.exit_code(), 0);
        let help = help.to_string();
        for words in ["weir demo", "weir check", "--config", "WEIR_CONFIG", "SIGHUP"] {
            assert!(help.contains(words), "help must speak of {words}: {help}");
        }
    }
}
