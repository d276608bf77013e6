//! Tells when the config has changed: the file itself, and the secrets and certificates it names.
//! What to do then (load, compare, swap) is the caller's business; nothing is parsed here.
//!
//! The *folders* of the files are watched, not the files, since what is called "saving" is often
//! a rename: editors write beside and move over, and a Kubernetes volume swaps the link `..data`
//! under which all its files are found. What matters is whether the content changed in the end,
//! so events only say *look now*; a slow poll looks too, for file systems that tell nothing.
//!
//! To add a cause: a variant of [`Cause`] and whoever calls [`Handle::trigger`].

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use super::files::Files;
use crate::clock;

/// Folders that are watched at most; what lies in others is noticed by the poll.
const FOLDERS_MAX: usize = 128;

/// Messages to the watching thread that may wait. One is enough to wake it; what it is to do is
/// kept beside.
const WAKE_UPS_MAX: usize = 1;

/// Why the config is to be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The content of a file changed.
    Content,
    /// Somebody sent SIGHUP.
    Signal,
    /// Somebody asked the admin API.
    Admin,
}

/// How patient a [`Watch`] is.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long nothing must happen before a change is believed to be whole.
    pub quiet: Duration,
    /// How long to wait for that quiet at most.
    pub quiet_max: Duration,
    /// Time between two looks when nothing happens.
    pub poll: Duration,
}

impl Patience {
    /// The usual one, with this time between two looks.
    pub fn polling_every(poll: Duration) -> Self {
        Self { quiet: Duration::from_millis(200), quiet_max: Duration::from_secs(2), poll }
    }
}

/// A thread that looks at the files of a config. Ends when dropped, after the reload that may be
/// running.
#[derive(Debug)]
pub struct Watch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// What one can ask of a [`Watch`], from any thread and from within a reload.
#[derive(Clone, Debug)]
pub struct Handle {
    wake: SyncSender<()>,
    wishes: Arc<Mutex<Wishes>>,
}

/// What the watching thread is to do when it wakes.
#[derive(Debug, Default)]
struct Wishes {
    touched: bool,
    trigger: Option<Cause>,
    files: Option<Files>,
    poll: Option<Duration>,
    stop: bool,
}

impl Watch {
    /// Watches the config at `config` and the `files` it was loaded with. `reload` is called on
    /// the watching thread, once for any number of changes that came since the last call; it is
    /// to load the file anew and to give its new [`Files`] to the handle, good or bad.
    ///
    /// It is called for [`Cause::Content`] only when some content differs from what was loaded,
    /// and never while the config file is missing.
    pub fn start(
        config: &Path,
        files: Files,
        patience: Patience,
        reload: impl FnMut(Cause, &Handle) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (wake, woken) = sync_channel(WAKE_UPS_MAX);
        let handle = Handle { wake, wishes: Arc::default() };
        let mut looker = Looker {
            config: config.to_owned(),
            files,
            patience,
            reload,
            folders: Folders::new(handle.clone()),
            woken,
            handle: handle.clone(),
        };
        looker.folders.watch(&looker.files);
        // What changed before the folders were watched made no event.
        handle.ask(|wishes| wishes.touched = true);
        let thread = std::thread::Builder::new()
            .name("config-watch".to_owned())
            .spawn(move || looker.run())?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// The same with a channel in place of the callback. A cause that finds the channel full is
    /// let go: one that was not taken yet stands for all, as the content is read only then.
    pub fn start_to_channel(
        config: &Path,
        files: Files,
        patience: Patience,
    ) -> std::io::Result<(Self, tokio::sync::mpsc::Receiver<Cause>)> {
        let (to, from) = tokio::sync::mpsc::channel(1);
        let reload = move |cause, _: &Handle| {
            if to.try_send(cause).is_err() {
                debug!(?cause, "a reload is waiting already");
            }
        };
        Ok((Self::start(config, files, patience, reload)?, from))
    }

    /// What one can ask of it.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Handle {
    /// Has the config loaded, whether or not anything changed.
    pub fn trigger(&self, cause: Cause) {
        self.ask(|wishes| wishes.trigger = Some(cause));
    }

    /// Looks at these files from now on: those of the config just loaded, in force or refused.
    pub fn set_files(&self, files: Files) {
        self.ask(|wishes| wishes.files = Some(files));
    }

    /// Changes the time between two looks.
    pub fn set_poll(&self, poll: Duration) {
        self.ask(|wishes| wishes.poll = Some(poll));
    }

    fn ask(&self, change: impl FnOnce(&mut Wishes)) {
        change(&mut self.wishes.lock());
        self.wake();
    }

    fn wake(&self) {
        match self.wake.try_send(()) {
            // Full: it is about to wake anyway. Disconnected: it has ended.
            Ok(()) | Err(TrySendError::Full(()) | TrySendError::Disconnected(())) => {}
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.handle.ask(|wishes| wishes.stop = true);
        let Some(thread) = self.thread.take() else { return };
        // Dropped by its own callback, it would wait for itself.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            warn!("the thread that watches the config has panicked");
        }
    }
}

/// What runs on the watching thread.
struct Looker<F> {
    config: PathBuf,
    files: Files,
    patience: Patience,
    reload: F,
    folders: Folders,
    woken: Receiver<()>,
    handle: Handle,
}

impl<F: FnMut(Cause, &Handle)> Looker<F> {
    fn run(mut self) {
        loop {
            match self.woken.recv_timeout(self.patience.poll) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let wishes = std::mem::take(&mut *self.handle.wishes.lock());
            if wishes.stop {
                return;
            }
            self.patience.poll = wishes.poll.unwrap_or(self.patience.poll);
            if let Some(files) = wishes.files {
                self.files = files;
            }
            // Folders come and go; links may lead elsewhere now.
            self.folders.watch(&self.files);
            if wishes.touched && wishes.trigger.is_none() {
                self.wait_for_quiet();
            }
            if wishes.trigger.is_none() && !self.config.exists() {
                debug!(path = %self.config.display(), "the config file is not there at the moment");
                continue;
            }
            let changed = self.files.changed();
            if let Some(cause) = wishes.trigger.or(changed.then_some(Cause::Content)) {
                (self.reload)(cause, &self.handle);
            }
        }
    }

    /// Waits until no event came for a while, so that a file is not read half written.
    fn wait_for_quiet(&self) {
        let start = clock::now();
        while clock::now().duration_since(start) < self.patience.quiet_max {
            let timed_out = self.woken.recv_timeout(self.patience.quiet).is_err();
            let mut wishes = self.handle.wishes.lock();
            if wishes.stop || wishes.trigger.is_some() || wishes.files.is_some() {
                drop(wishes);
                // Not for here: leave it, and be woken again.
                self.handle.wake();
                return;
            }
            wishes.touched = false;
            if timed_out {
                return;
            }
        }
    }
}

/// The folders that are watched, each once.
struct Folders {
    watcher: Option<RecommendedWatcher>,
    watched: BTreeMap<PathBuf, Identity>,
}

/// Tells a folder from another one that came in its place.
type Identity = (u64, u64);

impl Folders {
    fn new(to: Handle) -> Self {
        let heard = move |event: notify::Result<notify::Event>| {
            // Looking at the files makes events of its own, which must not lead to another look.
            let ours = |event: &notify::Event| {
                let written = AccessKind::Close(AccessMode::Write);
                matches!(event.kind, EventKind::Access(kind) if kind != written)
            };
            if !event.as_ref().is_ok_and(ours) {
                to.ask(|wishes| wishes.touched = true);
            }
        };
        let watcher = notify::recommended_watcher(heard)
            .inspect_err(|error| {
                warn!(%error, "changes of the config are noticed by polling only");
            })
            .ok();
        Self { watcher, watched: BTreeMap::new() }
    }

    /// Watches the folders in which these files are found, by name and behind links, and no other.
    fn watch(&mut self, files: &Files) {
        let Some(watcher) = &mut self.watcher else { return };
        let mut wanted = BTreeMap::new();
        for file in files.paths() {
            let target = std::fs::canonicalize(file).ok();
            for folder in [Some(folder_of(file)), target.as_deref().map(folder_of)] {
                let Some(folder) = folder else { continue };
                if FOLDERS_MAX <= wanted.len() || wanted.contains_key(folder) {
                    continue;
                }
                if let Ok(metadata) = std::fs::metadata(folder) {
                    wanted.insert(folder.to_owned(), identity(&metadata));
                }
            }
        }
        self.watched.retain(|folder, known| {
            let keep = wanted.get(folder) == Some(known);
            if !keep {
                // A folder that is gone has been forgotten already, hence no word on errors.
                drop(watcher.unwatch(folder));
            }
            keep
        });
        for (folder, identity) in wanted {
            if self.watched.contains_key(&folder) {
                continue;
            }
            match watcher.watch(&folder, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.watched.insert(folder, identity)),
                Err(error) => {
                    info!(folder = %folder.display(), %error, "a folder is polled, not watched");
                }
            }
        }
    }
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(unix)]
fn identity(metadata: &Metadata) -> Identity {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity(_: &Metadata) -> Identity {
    (0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(20);

    struct Bench {
        folder: tempfile::TempDir,
        watch: Watch,
        reloads: Receiver<(Cause, String)>,
    }

    impl Bench {
        /// Watches `name` in a folder that `make` fills.
        fn new(name: &str, poll: Duration, make: impl FnOnce(&Path)) -> Self {
            let folder = tempfile::tempdir().unwrap();
            make(folder.path());
            let config = folder.path().join(name);
            let (to, reloads) = mpsc::channel();
            let patience = Patience {
                quiet: Duration::from_millis(20),
                quiet_max: Duration::from_millis(500),
                poll,
            };
            let path = config.clone();
            let watch = Watch::start(&config, files(&config), patience, move |cause, handle| {
                handle.set_files(files(&path));
                to.send((cause, fs::read_to_string(&path).unwrap_or_default())).unwrap();
            });
            Self { folder, watch: watch.unwrap(), reloads }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// Waits until the newest content was loaded.
        fn expect(&self, content: &str) {
            loop {
                let (cause, seen) = self.reloads.recv_timeout(LONG).expect(content);
                assert_eq!(cause, Cause::Content);
                if seen == content {
                    return;
                }
            }
        }

        /// Goes through a reload that was asked for, and finds none before it.
        fn expect_nothing_so_far(&self) {
            self.watch.handle().trigger(Cause::Signal);
            assert_eq!(self.reloads.recv_timeout(LONG).unwrap().0, Cause::Signal);
        }
    }

    /// The files of a config whose text names them, one on a line behind `file: `.
    fn files(config: &Path) -> Files {
        let mut files = Files::of(config);
        let text = fs::read_to_string(config).unwrap_or_default();
        files.add_named(&super::super::tree::read(&text).unwrap());
        files
    }

    fn write(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
    }

    fn never() -> Duration {
        Duration::from_secs(3600)
    }

    #[test]
    fn a_file_written_in_place_is_noticed() {
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 1"));
        write(&bench.path("weir.yaml"), "a: 2");
        bench.expect("a: 2");
    }

    #[test]
    fn a_file_moved_over_it_is_noticed() {
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 1"));
        for text in ["a: 2", "a: 3", "a: 4"] {
            write(&bench.path(".weir.yaml.swp"), text);
            fs::rename(bench.path(".weir.yaml.swp"), bench.path("weir.yaml")).unwrap();
            bench.expect(text);
        }
    }

    #[test]
    fn a_file_deleted_and_made_again_is_noticed_and_its_absence_is_not() {
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 1"));
        fs::remove_file(bench.path("weir.yaml")).unwrap();
        bench.expect_nothing_so_far();
        write(&bench.path("weir.yaml"), "a: 2");
        bench.expect("a: 2");
    }

    #[cfg(unix)]
    #[test]
    fn a_kubernetes_volume_that_swaps_its_link_is_noticed() {
        use std::os::unix::fs::symlink;
        let fill = |at: &Path, version: &str, text: &str| {
            let data = at.join(version);
            fs::create_dir(&data).unwrap();
            write(&data.join("weir.yaml"), text);
            symlink(version, at.join("..data_tmp")).unwrap();
            fs::rename(at.join("..data_tmp"), at.join("..data")).unwrap();
        };
        let bench = Bench::new("weir.yaml", never(), |at| {
            fill(at, "..v1", "a: 1");
            symlink("..data/weir.yaml", at.join("weir.yaml")).unwrap();
        });
        for (old, new) in [("..v1", "..v2"), ("..v2", "..v3"), ("..v3", "..v4")] {
            fill(bench.folder.path(), new, new);
            fs::remove_dir_all(bench.path(old)).unwrap();
            bench.expect(new);
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_file_elsewhere_is_followed() {
        let elsewhere = tempfile::tempdir().unwrap();
        let target = elsewhere.path().join("real.yaml");
        write(&target, "a: 1");
        let link = |at: &Path| std::os::unix::fs::symlink(&target, at.join("weir.yaml")).unwrap();
        let bench = Bench::new("weir.yaml", never(), link);
        write(&target, "a: 2");
        bench.expect("a: 2");
    }

    #[test]
    fn a_folder_removed_and_made_again_is_noticed_by_the_poll() {
        let bench = Bench::new("conf/weir.yaml", Duration::from_millis(50), |at| {
            fs::create_dir(at.join("conf")).unwrap();
            write(&at.join("conf/weir.yaml"), "a: 1");
        });
        for text in ["a: 2", "a: 3"] {
            fs::remove_dir_all(bench.path("conf")).unwrap();
            fs::create_dir(bench.path("conf")).unwrap();
            write(&bench.path("conf/weir.yaml"), text);
            bench.expect(text);
        }
    }

    #[test]
    fn a_secret_named_in_the_config_is_noticed_even_when_it_comes_later() {
        let named = |path: &Path| format!("fleet: {{api_key: {{file: {}}}}}", path.display());
        let keys = tempfile::tempdir().unwrap();
        let (first, second) = (keys.path().join("first"), keys.path().join("second"));
        write(&first, "k-1");
        let text = named(&first);
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), &text));
        write(&first, "k-2");
        bench.expect(&text);
        let text = named(&second);
        write(&bench.path("weir.yaml"), &text);
        bench.expect(&text);
        write(&second, "k-3");
        bench.expect(&text);
    }

    #[test]
    fn the_same_content_is_no_change() {
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 1"));
        write(&bench.path("weir.yaml"), "a: 1");
        write(&bench.path("other.yaml"), "a: 2");
        write(&bench.path(".new"), "a: 1");
        fs::rename(bench.path(".new"), bench.path("weir.yaml")).unwrap();
        bench.expect_nothing_so_far();
    }

    #[test]
    fn a_change_between_the_load_and_the_watch_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("weir.yaml");
        write(&config, "a: 1");
        let loaded = files(&config);
        write(&config, "a: 2");
        let (to, reloads) = mpsc::channel();
        let reload = move |cause, _: &Handle| to.send(cause).unwrap();
        let patience = Patience::polling_every(never());
        let _watch = Watch::start(&config, loaded, patience, reload).unwrap();
        assert_eq!(reloads.recv_timeout(LONG), Ok(Cause::Content));
    }

    #[test]
    fn who_asks_gets_a_reload_whether_or_not_anything_changed() {
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 1"));
        for cause in [Cause::Signal, Cause::Admin, Cause::Signal] {
            bench.watch.handle().trigger(cause);
            assert_eq!(bench.reloads.recv_timeout(LONG).unwrap().0, cause);
        }
    }

    #[test]
    fn a_full_channel_does_not_stop_the_watching() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("weir.yaml");
        write(&config, "a: 1");
        let patience = Patience::polling_every(never());
        let (watch, mut causes) =
            Watch::start_to_channel(&config, files(&config), patience).unwrap();
        for _ in 0..100 {
            watch.handle().trigger(Cause::Admin);
        }
        assert_eq!(causes.blocking_recv(), Some(Cause::Admin));
        drop(watch);
        while causes.blocking_recv().is_some() {}
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thousand_reloads_leave_nothing_behind() {
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        let bench = Bench::new("weir.yaml", never(), |at| write(&at.join("weir.yaml"), "a: 0"));
        let reload = |count: usize| {
            let text = format!("a: {count}");
            match count % 10 {
                // Every tenth goes all the way from a changed file.
                0 => {
                    write(&bench.path(".new"), &text);
                    fs::rename(bench.path(".new"), bench.path("weir.yaml")).unwrap();
                    bench.expect(&text);
                }
                _ => {
                    bench.watch.handle().trigger(Cause::Admin);
                    assert_eq!(bench.reloads.recv_timeout(LONG).unwrap().0, Cause::Admin);
                }
            }
        };
        (1..=50).for_each(reload);
        let before = open();
        (51..=1000).for_each(reload);
        // Other tests of this process open files too, each of them a few.
        assert!(open() < before + 100, "a reload must not keep a file or a watcher");
    }
}
