//! The example configs are true: each one is accepted, starts, and serves what it says.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_yaml::Value;

use crate::kit::{Certificate, Upstream, Weir, free_address, json, run};

fn examples() -> Vec<PathBuf> {
    let conf = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf");
    let mut found = vec![conf.join("weir.yaml")];
    let files = std::fs::read_dir(conf.join("examples")).unwrap();
    found.extend(files.map(|file| file.unwrap().path()));
    found.sort();
    found
}

/// The files that examples name, in a folder of the test's own.
fn files(folder: &Path) {
    for (pair, certificate, key) in [
        ("one", "tls.crt", "tls.key"),
        ("two", "engines-ca.pem", "engines-ca.key"),
        ("three", "client.crt", "client.key"),
    ] {
        let made = Certificate::write(folder, pair, &["localhost"]);
        std::fs::copy(made.certificate, folder.join(certificate)).unwrap();
        std::fs::copy(made.key, folder.join(key)).unwrap();
    }
    std::fs::write(folder.join("engine.key"), "k-file\n").unwrap();
}

/// The example with the addresses of this machine's tests; the address to speak to.
fn settled(text: &str, urls: &mut impl Iterator<Item = String>) -> (String, SocketAddr) {
    let mut config: Value = serde_yaml::from_str(text).unwrap();
    let address = free_address();
    match config.get_mut("listen").and_then(Value::as_sequence_mut) {
        None => {
            let listen = format!("[{{address: '{address}'}}]");
            config["listen"] = serde_yaml::from_str(&listen).unwrap();
        }
        Some(listeners) => {
            for listen in listeners {
                let plain = listen.get("tls").is_none_or(Value::is_null);
                let own = if plain { address } else { free_address() };
                listen["address"] = own.to_string().into();
            }
        }
    }
    if let Some(admin) = config.get_mut("admin") {
        *admin = Value::Null;
    }
    for replica in config["fleet"]["replicas"].as_sequence_mut().unwrap() {
        if replica["url"].as_str().unwrap().starts_with("http:") {
            replica["url"] = urls.next().unwrap().into();
        }
    }
    (serde_yaml::to_string(&config).unwrap(), address)
}

/// The models that the replicas of an example are said to serve.
fn models(text: &str) -> Vec<String> {
    let config: Value = serde_yaml::from_str(text).unwrap();
    let replicas = config["fleet"]["replicas"].as_sequence().unwrap();
    let fixed = replicas.iter().filter_map(|replica| replica.get("models")?.as_sequence());
    let mut models: Vec<String> =
        fixed.flatten().map(|model| model.as_str().unwrap().to_owned()).collect();
    if models.is_empty() {
        models.push("m".to_owned());
    }
    let aliases = config["fleet"].get("aliases").and_then(Value::as_mapping);
    let names = aliases.into_iter().flat_map(|aliases| aliases.keys());
    models.extend(names.map(|alias| alias.as_str().unwrap().to_owned()));
    models
}

#[test]
fn every_example_starts_and_serves() {
    run(async {
        let mut replicas = Vec::new();
        for _ in 0..4 {
            replicas.push(Upstream::start("m", |_| json("{}")).await);
        }
        let examples = examples();
        assert!(10 < examples.len());
        for path in examples {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let folder = tempfile::tempdir().unwrap();
            files(folder.path());
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.replace("/etc/weir/", &format!("{}/", folder.path().display()));
            let mut urls = replicas.iter().map(Upstream::url).cycle();
            let (config, address) = settled(&text, &mut urls);
            let file = folder.path().join("checked.yaml");
            std::fs::write(&file, &config).unwrap();
            let done = Command::new(env!("CARGO_BIN_EXE_weir"))
                .arg("check")
                .arg(&file)
                .env("ENGINES_KEY", "k-engines")
                .env("ENGINE_6_KEY", "k-engine-6")
                .output()
                .unwrap();
            let written = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
            assert_eq!(done.status.code(), Some(0), "{name}:\n{written}");
            assert!(!written.contains("k-engine"), "{name}: a key is shown:\n{written}");
            let mut weir = Weir::start_live_in(folder, &config, address).await;
            if text.contains("https://") {
                continue;
            }
            weir.ready().await;
            for model in models(&text) {
                let reply = weir.chat(&model, false).await;
                assert_eq!(reply.status, 200, "{name}, `{model}`: {reply:?}");
            }
            weir.assert_at_rest().await;
        }
    });
}

#[test]
fn the_program_explains_itself() {
    let weir = |arguments: &[&str]| {
        let done = Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).output().unwrap();
        let written = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
        (done.status.code(), written)
    };
    let (code, written) = weir(&["--version"]);
    assert_eq!((code, written.trim()), (Some(0), concat!("weir ", env!("CARGO_PKG_VERSION"))));
    let (code, written) = weir(&["--help"]);
    assert_eq!(code, Some(0));
    for word in ["demo", "check", "--config"] {
        assert!(written.contains(word), "{written}");
    }
    let (code, written) = weir(&["check", "/no/such/file.yaml"]);
    assert_eq!(code, Some(1));
    assert!(written.contains("/no/such/file.yaml"), "{written}");
    assert_eq!(weir(&["--no-such-flag"]).0, Some(2));
    let (code, written) = weir(&["--config", "/no/such/file.yaml"]);
    assert_ne!(code, Some(0));
    assert!(written.contains("/no/such/file.yaml"), "{written}");
}

#[test]
fn the_demo_needs_nothing_else() {
    run(async {
        let address = free_address();
        let port = address.port().to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["demo", "--engines", "2", "--port", &port])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        crate::kit::until("the demo answers", async || {
            tokio::net::TcpStream::connect(address).await.ok()?;
            let ready = crate::kit::Request::get("/ready").send(address).await;
            (ready.status == 200).then_some(())
        })
        .await;
        let body = r#"{"model":"demo","stream":true,"max_tokens":5,
            "messages":[{"role":"user","content":"hello"}]}"#;
        let request = crate::kit::Request::post("/v1/chat/completions", body);
        let events = request.send(address).await.expect(200).events();
        assert_eq!(events.last().unwrap().data, "[DONE]");
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        let status = crate::kit::until("the demo ends", async || child.try_wait().unwrap()).await;
        assert!(status.success(), "{status}");
        let mut written = String::new();
        std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut written).unwrap();
        assert!(written.contains("curl") && written.contains(&port), "{written}");
    });
}
