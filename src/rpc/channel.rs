//! [`Peer`]: another task, connected, compared and watched.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::StreamExt;

use super::control::Identity;
use super::proto::control_client::ControlClient;
use super::proto::{Beat, JoinRequest, LeaveRequest, Stop};
use super::security::{Line, Security, bad_certificate, root_cause};
use super::server::{CONNECTION_WINDOW, FRAME, STREAM_WINDOW};
use super::{PROTOCOL, RpcError, Runtime, shortcut};
use crate::cluster::TaskId;

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For peers to come at the start.
    pub rendezvous: Duration,
    /// Between beats; a peer is lost after two without an answer.
    pub heartbeat: Duration,
    /// Whether those who are awaited have been here before.
    pub again: bool,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            rendezvous: Duration::from_secs(60),
            heartbeat: Duration::from_secs(2),
            again: false,
        }
    }
}

/// Another task of the cluster.
#[derive(Clone)]
pub struct Peer {
    /// Who.
    pub task: TaskId,
    /// Where.
    pub address: String,
    /// The connection.
    pub(super) channel: Line,
    /// Whether it is on this host.
    pub(super) near: bool,
    /// This life of it.
    pub incarnation: u64,
    /// Set when it is lost, or says that the run is over.
    end: Arc<watch::Sender<Option<RpcError>>>,
}

/// How long a checkpoint may take to come when everything else is over.
const LAST_CALL: Duration = Duration::from_secs(10);

/// How long a step may take to end after a signal.
const LAST_STEP: Duration = Duration::from_secs(4);

/// How often a signal is looked for.
const GLANCE: Duration = Duration::from_millis(100);

/// The pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(100);

impl Peer {
    /// Connects to all of `tasks`, in any order of their start, compares settings and keeps watching them.
    /// `waiting` is told every few seconds who is missing; an error of `over` ends the wait. Who has come hears of a
    /// failure, unless it is a refusal: a stranger stops nobody.
    pub async fn connect_all(
        tasks: &[(TaskId, String)],
        identity: &Arc<Identity>,
        security: &Security,
        timeouts: Timeouts,
        waiting: &(dyn Fn(&[TaskId]) + Sync),
        over: &(dyn Fn() -> Result<(), RpcError> + Sync),
    ) -> Result<Vec<Self>, RpcError> {
        let mut peers: Vec<Option<Self>> = vec![None; tasks.len()];
        let gathered =
            Self::gather(&mut peers, tasks, identity, security, timeouts, waiting, over).await;
        let peers = peers.into_iter().flatten();
        match gathered {
            Ok(()) => return Ok(peers.collect()),
            Err(RpcError::Refused { .. }) => {}
            Err(ref error) => {
                for peer in peers {
                    peer.leave(identity, Some((&error.to_string(), error.code()))).await;
                }
            }
        }
        gathered.map(|()| Vec::new())
    }

    async fn gather(
        peers: &mut [Option<Self>],
        tasks: &[(TaskId, String)],
        identity: &Arc<Identity>,
        security: &Security,
        timeouts: Timeouts,
        waiting: &(dyn Fn(&[TaskId]) + Sync),
        over: &(dyn Fn() -> Result<(), RpcError> + Sync),
    ) -> Result<(), RpcError> {
        let start = tokio::time::Instant::now();
        let mut told = start;
        let mut last = String::new();
        loop {
            over()?;
            for (peer, (task, address)) in peers.iter_mut().zip(tasks) {
                // One that died while others were awaited may come again; one may also have heard that all is over.
                let end = peer.as_ref().and_then(|peer| peer.end.borrow().clone());
                if let Some(error) = end {
                    *peer = None;
                    if let RpcError::Stopped { .. } = error {
                        return Err(error);
                    }
                }
                if peer.is_none() {
                    match Self::connect(task, address, identity, security, timeouts).await {
                        Ok(joined) => *peer = Some(joined),
                        Err(RpcError::Lost { reason, .. }) => last = reason,
                        Err(refused) => return Err(refused),
                    }
                }
            }
            let missing: Vec<(TaskId, String)> = tasks
                .iter()
                .zip(peers.iter())
                .filter(|(_, p)| p.is_none())
                .map(|(t, _)| t.clone())
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if start.elapsed() >= timeouts.rendezvous {
                let waited_secs = start.elapsed().as_secs_f64();
                let again = timeouts.again;
                return Err(RpcError::Missing { missing, again, waited_secs, last });
            }
            if told.elapsed() >= Duration::from_secs(3) {
                told = tokio::time::Instant::now();
                let names: Vec<TaskId> = missing.into_iter().map(|(task, _)| task).collect();
                waiting(&names);
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn connect(
        task: &TaskId,
        address: &str,
        identity: &Arc<Identity>,
        security: &Security,
        timeouts: Timeouts,
    ) -> Result<Self, RpcError> {
        let lost = |reason: String| RpcError::Lost {
            task: task.clone(),
            address: address.to_owned(),
            reason,
        };
        let refused = |reason: String| RpcError::Refused { task: task.clone(), reason };
        // Names are resolved anew at each try, so a host may appear late.
        let endpoint = security
            .endpoint(address)
            .map_err(|error| lost(error.to_string()))?
            .connect_timeout(Duration::from_secs(2))
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(1 << 16)
            .max_frame_size(FRAME)
            .http2_keep_alive_interval(timeouts.heartbeat)
            .keep_alive_timeout(timeouts.heartbeat)
            .keep_alive_while_idle(true);
        let shortcut = shortcut::find(address).await;
        let near = shortcut.is_some();
        let connected = match shortcut {
            Some(shortcut) => endpoint.connect_with_connector(shortcut).await,
            None => endpoint.connect().await,
        };
        let channel = connected.map_err(|error| {
            bad_certificate(&error).map_or_else(|| lost(root_cause(&error)), refused)
        })?;
        let channel = Line::new(channel, security.credentials());
        let mut control = ControlClient::new(channel.clone());
        let request = JoinRequest {
            protocol: PROTOCOL,
            task: identity.task.to_string(),
            called: task.to_string(),
            incarnation: identity.incarnation,
            settings: identity.settings.clone().into_iter().collect(),
        };
        // Who listens may still not speak; and a server looks at the certificate only after the client thinks that it is
        // connected.
        let silent = |_| lost("no answer for two heartbeats".to_owned());
        let joined = tokio::time::timeout(2 * timeouts.heartbeat, control.join(request))
            .await
            .map_err(silent)?
            .map_err(|status| {
                let other = || RpcError::from_status(task, address, &status);
                bad_certificate(&status).map_or_else(other, refused)
            })?;
        let end = Arc::new(watch::Sender::new(None));
        let peer = Self {
            task: task.clone(),
            address: address.to_owned(),
            channel,
            near,
            incarnation: joined.into_inner().incarnation,
            end,
        };
        tokio::spawn(peer.clone().watch(identity.clone(), timeouts.heartbeat));
        Ok(peer)
    }

    /// Beats until the peer's stream ends, and says why it did.
    async fn watch(self, identity: Arc<Identity>, heartbeat: Duration) {
        let beat = Beat {
            task: identity.task.to_string(),
            incarnation: identity.incarnation,
            ..Beat::default()
        };
        let ticks =
            tokio_stream::wrappers::IntervalStream::new(tokio::time::interval(heartbeat / 2));
        let beats = ticks.map(move |_| beat.clone());
        let lost = |reason: &str| RpcError::Lost {
            task: self.task.clone(),
            address: self.address.clone(),
            reason: reason.to_owned(),
        };
        let end = match ControlClient::new(self.channel.clone()).watch(beats).await {
            Err(status) => RpcError::from_status(&self.task, &self.address, &status),
            Ok(answer) => {
                let mut answers = answer.into_inner();
                loop {
                    match tokio::time::timeout(2 * heartbeat, answers.message()).await {
                        // The stream stays, as this task may still ask for what it saves.
                        Ok(Ok(Some(Beat { stop: Some(stop), .. }))) => {
                            let Stop { task, reason, code } = stop;
                            let code = u8::try_from(code).unwrap_or(1);
                            self.end.send_replace(Some(RpcError::Stopped { task, reason, code }));
                        }
                        Ok(Ok(Some(_))) => {}
                        Ok(Ok(None)) => break lost("it closed the connection"),
                        Ok(Err(s)) => break RpcError::from_status(&self.task, &self.address, &s),
                        Err(_) => break lost("no sign of life for two heartbeats"),
                    }
                }
            }
        };
        self.ends(end);
    }

    /// It is of no more use, for the first reason that there is.
    fn ends(&self, reason: RpcError) {
        self.end.send_if_modified(|why| why.is_none() && why.replace(reason).is_none());
    }

    /// Gives up the step at hand when a signal has come and the step does not end, since another task stands still: the
    /// calls to `peers` end as if the run were over.
    pub fn end_with_signal(
        runtime: &Runtime,
        peers: &[Self],
        own: &TaskId,
        signal: &Arc<AtomicUsize>,
    ) {
        let (peers, own, signal) = (peers.to_vec(), own.to_string(), signal.clone());
        drop(runtime.spawn(async move {
            while signal.load(Ordering::Relaxed) == 0 {
                tokio::time::sleep(GLANCE).await;
            }
            tokio::time::sleep(LAST_STEP).await;
            let number = signal.load(Ordering::Relaxed);
            for peer in peers {
                peer.ends(RpcError::Stopped {
                    task: own.clone(),
                    reason: format!("interrupted by signal {number}"),
                    code: 128 + number as u8,
                });
            }
        }));
    }

    /// Waits until the peer is lost, or the run is over.
    pub(super) async fn ended(&self) -> RpcError {
        let mut end = self.end.subscribe();
        let value = end.wait_for(Option::is_some).await.ok().and_then(|value| value.clone());
        value.unwrap_or_else(|| RpcError::Lost {
            task: self.task.clone(),
            address: self.address.clone(),
            reason: "its watch ended".to_owned(),
        })
    }

    /// Whether it is lost, or the run is over.
    pub(super) fn has_ended(&self) -> bool {
        self.end.borrow().is_some()
    }

    /// A call's answer, or why this peer is gone.
    pub(super) async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, tonic::Status>>,
    ) -> Result<T, RpcError> {
        tokio::select! {
            answer = call => {
                answer.map_err(|status| RpcError::from_status(&self.task, &self.address, &status))
            }
            error = self.ended() => Err(error),
        }
    }

    /// As [`Peer::within`], also after the run is over.
    pub(super) async fn at_last<T>(
        &self,
        call: impl Future<Output = Result<T, tonic::Status>>,
    ) -> Result<T, RpcError> {
        let late = Err(tonic::Status::unavailable("no answer"));
        let answer = tokio::time::timeout(LAST_CALL, call).await.unwrap_or(late);
        answer.map_err(|status| RpcError::from_status(&self.task, &self.address, &status))
    }

    /// Says good-bye to all of `peers`: the work is done, or it failed with this exit code and everybody shall stop.
    pub fn leave_all(
        runtime: &Runtime,
        peers: &[Self],
        identity: &Identity,
        failure: Option<(&str, u8)>,
    ) {
        runtime.block_on(async {
            for peer in peers {
                // Who is silent would only be waited for.
                let lost = matches!(&*peer.end.borrow(), Some(RpcError::Lost { .. }));
                if !lost {
                    peer.leave(identity, failure).await;
                }
            }
        });
    }

    async fn leave(&self, identity: &Identity, failure: Option<(&str, u8)>) {
        let request = LeaveRequest {
            task: identity.task.to_string(),
            incarnation: identity.incarnation,
            failure: failure.map_or(String::new(), |(reason, _)| reason.to_owned()),
            code: failure.map_or(0, |(_, code)| u32::from(code)),
        };
        // A peer that is gone needs no good-bye.
        let mut control = ControlClient::new(self.channel.clone());
        let said = control.leave(request);
        let _ = tokio::time::timeout(Duration::from_secs(2), said).await;
    }
}
