//! `weir check`: what is wrong with a config file, or that nothing is, for a person to read.
//! Only words live here. Nothing is judged.

use std::io::{self, Write};
use std::path::Path;

use super::fault::Fault;
use super::{Config, Loaded};

/// Checks `file`. Writes `FILE: ok` and a summary to `out`, or every fault to `err`; with `print`
/// also the effective config to `out`. True when the config is good.
pub fn check_file(
    file: &Path,
    print: super::cli::Print,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<bool> {
    let loaded = Loaded::from_file(file);
    let name = file.display().to_string();
    match loaded.config {
        Err(faults) => {
            for fault in &faults {
                write_fault(err, &name, "", fault)?;
            }
            let count = match faults.len() {
                1 => "1 fault".to_owned(),
                count => format!("{count} faults"),
            };
            writeln!(err, "{name}: {count}")?;
            Ok(false)
        }
        Ok(config) => {
            for warning in &loaded.warnings {
                write_fault(err, &name, "warning: ", warning)?;
            }
            match print {
                super::cli::Print::Config => write!(out, "{}", config.shown())?,
                super::cli::Print::Summary => {
                    writeln!(out, "{name}: ok")?;
                    write_summary(out, &config)?;
                }
            }
            Ok(true)
        }
    }
}

fn write_fault(to: &mut dyn Write, name: &str, kind: &str, fault: &Fault) -> io::Result<()> {
    write!(to, "{name}:")?;
    if let Some(line) = fault.line {
        write!(to, "{line}:")?;
    }
    write!(to, " {kind}")?;
    if !fault.path.is_empty() {
        write!(to, "{}: ", fault.path)?;
    }
    write!(to, "{}", fault.problem)?;
    if let Some(found) = &fault.found {
        write!(to, ", found {found}")?;
    }
    writeln!(to)?;
    match &fault.advice {
        Some(advice) => writeln!(to, "    {advice}"),
        None => Ok(()),
    }
}

fn write_summary(to: &mut dyn Write, config: &Config) -> io::Result<()> {
    for listen in &config.listen {
        let scheme = if listen.tls.is_some() { "https" } else { "http" };
        writeln!(to, "  listens   {scheme}://{}", listen.address)?;
    }
    match config.admin.address {
        Some(address) => writeln!(to, "  admin     http://{address}")?,
        None => writeln!(to, "  admin     off")?,
    }
    let replicas = &config.fleet.replicas;
    writeln!(to, "  replicas  {}", replicas.len())?;
    let mut models: Vec<_> =
        replicas.iter().flat_map(|replica| &replica.models).map(|name| name.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    if replicas.iter().any(|replica| replica.models.is_empty()) {
        models.push("what the replicas list");
    }
    writeln!(to, "  models    {}", models.join(", "))?;
    if !config.fleet.aliases.is_empty() {
        writeln!(to, "  aliases   {}", config.fleet.aliases.len())?;
    }
    writeln!(to, "  policy    {}", config.routing.policy)?;
    writeln!(to, "  config    {}", config.fingerprint())
}

#[cfg(test)]
mod tests {
    use super::super::cli::Print;
    use super::*;

    fn check(text: &str, print: Print) -> (bool, String, String) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weir.yaml");
        std::fs::write(&file, text).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let good = check_file(&file, print, &mut out, &mut err).unwrap();
        let name = file.display().to_string();
        let told = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().replace(&name, "FILE");
        (good, told(out), told(err))
    }

    #[test]
    fn a_good_file_is_summed_up() {
        let text = "fleet: {replicas: [{url: 'http://a:1', models: [m]}], aliases: {s: m}}";
        let (good, out, err) = check(text, Print::Summary);
        assert!(good && err.is_empty(), "{err}");
        assert!(out.starts_with("FILE: ok\n  listens   http://0.0.0.0:8080\n"), "{out}");
        assert!(out.contains("replicas  1\n  models    m\n  aliases   1\n"), "{out}");
    }

    #[test]
    fn every_fault_comes_with_its_line_and_advice() {
        let text = "fleet:\n  replicas:\n  - url: a:1\n  - ulr: http://b:1\nserver: {grace: 5}\n";
        let (good, out, err) = check(text, Print::Summary);
        assert!(!good && out.is_empty());
        let expected = "\
FILE:3: fleet.replicas[0].url: no scheme, found \"a:1\"
    write `http://a:1`
FILE:4: fleet.replicas[1].ulr: unknown key
    did you mean `url`?
FILE:5: server.grace: not a duration, found 5
    write the unit too: `5s` for seconds, `5ms` for milliseconds, or `5m` for minutes
FILE: 3 faults
";
        assert_eq!(err, expected);
    }

    #[test]
    fn a_warning_does_not_make_a_file_bad() {
        let (good, _, err) =
            check("fleet: {replicas: [{url: 'http://a:1', api_key: k-1}]}", Print::Summary);
        assert!(good);
        assert!(err.starts_with("FILE:1: warning: fleet.replicas[0].api_key: "), "{err}");
        assert!(!err.contains("k-1"));
    }

    #[test]
    fn the_effective_config_is_printed_alone() {
        let (good, out, _) = check("fleet: {replicas: [{url: 'http://a:1'}]}", Print::Config);
        assert!(good && Config::parse(&out).is_ok(), "what is printed must load: {out}");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let file = Path::new("/no/such/weir.yaml");
        assert!(!check_file(file, Print::Summary, &mut out, &mut err).unwrap());
        let err = String::from_utf8(err).unwrap();
        assert!(err.contains("`/no/such/weir.yaml` does not exist"), "{err}");
    }
}
