//! The proxies that are compared, each a process of its own in front of the same engines.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A proxy that runs; killed when dropped.
pub struct Proxy {
    name: &'static str,
    address: SocketAddr,
    child: Child,
    folder: Option<PathBuf>,
}

impl Proxy {
    /// Pingora, passing on.
    pub fn bare(engines: &[SocketAddr]) -> Self {
        let address = free_address();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--bare", &address.to_string(), &join(engines, ",")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { name: "bare", address, child, folder: None }
    }

    /// Weir, with its access log off as the others have theirs.
    pub fn weir(engines: &[SocketAddr], model: &str) -> Self {
        let address = free_address();
        let folder = folder("weir");
        let mut text = format!(
            "listen: [{{address: \"{address}\"}}]\nadmin: {{address: off}}\n\
             telemetry: {{access_log: {{format: off}}, log: {{level: warn}}}}\n\
             routing: {{policy: round_robin}}\nfleet:\n  replicas:\n"
        );
        for engine in engines {
            text += &format!("    - {{url: \"http://{engine}\", models: [{model}]}}\n");
        }
        let file = folder.join("weir.yaml");
        fs::write(&file, text).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .arg("--config")
            .arg(&file)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { name: "weir", address, child, folder: Some(folder) }
    }

    /// nginx, unbuffered and with keep-alive; none where it is not installed.
    pub fn nginx(engines: &[SocketAddr]) -> Option<Self> {
        let program = ["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"]
            .into_iter()
            .find(|path| PathBuf::from(path).exists());
        let Some(program) = program else {
            println!("nginx is not installed: it is left out (apt-get install nginx-light)");
            return None;
        };
        let address = free_address();
        let folder = folder("nginx");
        let servers: String =
            engines.iter().map(|engine| format!("    server {engine};\n")).collect();
        let text = format!(
            "daemon off;\nworker_processes 2;\npid {0}/pid;\nerror_log {0}/error.log crit;\n\
             worker_rlimit_nofile 65536;\n\
             events {{ worker_connections 16384; }}\nhttp {{\n  access_log off;\n\
             client_body_temp_path {0}/body;\n  proxy_temp_path {0}/proxy;\n\
             fastcgi_temp_path {0}/f;\n  uwsgi_temp_path {0}/u;\n  scgi_temp_path {0}/s;\n\
             upstream engines {{\n{servers}    keepalive 512;\n  }}\n\
             server {{\n    listen {address};\n    client_max_body_size 0;\n    location / {{\n\
             proxy_pass http://engines;\n      proxy_http_version 1.1;\n\
             proxy_set_header Connection \"\";\n      proxy_buffering off;\n\
             proxy_request_buffering off;\n      proxy_read_timeout 600s;\n    }}\n  }}\n}}\n",
            folder.display()
        );
        let file = folder.join("nginx.conf");
        fs::write(&file, text).unwrap();
        let child = Command::new(program)
            .arg("-c")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { name: "nginx", address, child, folder: Some(folder) })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Until it passes a request on.
    pub async fn wait_ready(&self) {
        for _ in 0..500 {
            if self.passes().await.unwrap_or(false) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{} does not serve", self.name);
    }

    async fn passes(&self) -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(self.address).await?;
        let request = "GET /v1/models HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text).await?;
        Ok(text.starts_with(b"HTTP/1.1 200"))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let terminate = Command::new("kill").arg(self.child.id().to_string()).status();
        if terminate.is_err() || self.name != "nginx" {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
        if let Some(folder) = &self.folder {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("weir-bench-{name}-{}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

fn join(addresses: &[SocketAddr], between: &str) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}
