//! Streams of messages that are mostly data, as tonic would put them on the wire, without its copies.
//!
//! tonic writes each message into a buffer before it is sent, and gathers it in another before it is read. Here the data of a
//! message goes to HTTP/2 as it is, as a frame of its own, and what arrives in one frame is handed on as it is. Both ends may be
//! any gRPC implementation.
//!
//! Generated clients and servers stay in charge of everything else: a [`Bulk`] around them swaps the bodies of the streams of
//! [`REQUESTS`] and [`REPLIES`]; these pass tonic as extensions, beside streams that are empty.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{Extensions, HeaderMap, HeaderValue};
use http_body::{Body as HttpBody, Frame};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use tokio_stream::Stream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, StdError};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::proto::{Chunk, Place, Segment};

/// Methods with a stream of data to the server.
const REQUESTS: [&str; 4] = [
    "/tftrain.v1.Collective/Exchange",
    "/tftrain.v1.Towers/Gradients",
    "/tftrain.v1.Variables/Push",
    "/tftrain.v1.Variables/Restore",
];

/// Methods with a stream of data to the client.
const REPLIES: [&str; 2] = ["/tftrain.v1.Towers/Gradients", "/tftrain.v1.Variables/Pull"];

/// Before each message: a byte that says that it is not compressed, and four of its length.
const HEAD: usize = 5;

/// The longest message that is read; ours are far shorter.
const LONGEST: usize = 4 << 20;

/// A message whose last field is its data.
pub(super) trait Laden: Message + Default {
    /// The field's number.
    const DATA: u32;

    /// The field.
    fn data(&mut self) -> &mut Bytes;

    /// Takes where the data is, in place of it.
    fn place(&mut self) -> Option<Place>;
}

impl Laden for Chunk {
    const DATA: u32 = 2;

    fn data(&mut self) -> &mut Bytes {
        &mut self.data
    }

    fn place(&mut self) -> Option<Place> {
        self.place.take()
    }
}

impl Laden for Segment {
    const DATA: u32 = 3;

    fn data(&mut self) -> &mut Bytes {
        &mut self.data
    }

    fn place(&mut self) -> Option<Place> {
        self.place.take()
    }
}

/// What goes before the data of a message, and the data.
fn cut<M: Laden>(mut message: M) -> (Bytes, Bytes) {
    let load = std::mem::take(message.data());
    let mut head = BytesMut::with_capacity(HEAD + message.encoded_len() + 16);
    head.put_bytes(0, HEAD);
    message.encode_raw(&mut head);
    if !load.is_empty() {
        encode_key(M::DATA, WireType::LengthDelimited, &mut head);
        encode_varint(load.len() as u64, &mut head);
    }
    let len = (head.len() - HEAD + load.len()) as u32;
    head[1..HEAD].copy_from_slice(&len.to_be_bytes());
    (head.freeze(), load)
}

/// Messages as a body.
struct Outgoing<S> {
    messages: S,
    /// Of the message whose head has gone.
    data: Bytes,
    /// What a server says at the end.
    trailers: Option<HeaderMap>,
}

impl<M: Laden, S: Stream<Item = M> + Unpin> HttpBody for Outgoing<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        let next = ready!(Pin::new(&mut self.messages).poll_next(context));
        Poll::Ready(match next {
            Some(message) => {
                let (head, data) = cut(message);
                self.data = data;
                Some(Ok(Frame::data(head)))
            }
            None => self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))),
        })
    }
}

/// The messages of a body.
pub(super) struct Incoming<M> {
    body: Body,
    pieces: Pieces,
    /// The length of the message that is coming, once its head is there.
    len: Option<usize>,
    message: PhantomData<fn() -> M>,
}

impl<M: Laden> Incoming<M> {
    fn of(body: Body) -> Self {
        Self { body, pieces: Pieces::default(), len: None, message: PhantomData }
    }

    /// The next message, where all of it is there.
    fn whole(&mut self) -> Result<Option<M>, Status> {
        if self.len.is_none() && self.pieces.len >= HEAD {
            if self.pieces.get_u8() != 0 {
                return Err(Status::unimplemented("no compression is known here"));
            }
            let len = self.pieces.get_u32() as usize;
            if len > LONGEST {
                let text = format!("a message of {len} bytes, {LONGEST} at most");
                return Err(Status::out_of_range(text));
            }
            self.len = Some(len);
        }
        let Some(len) = self.len.take_if(|len| self.pieces.len >= *len) else { return Ok(None) };
        let message = M::decode((&mut self.pieces).take(len));
        message.map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}

impl<M: Laden> Stream for Incoming<M> {
    type Item = Result<M, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let failure = loop {
            match self.whole() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(message))),
                Err(status) => break status,
            }
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                Some(Err(status)) => break status,
                None if self.len.is_none() && self.pieces.len == 0 => return Poll::Ready(None),
                None => break Status::data_loss("the stream ended within a message"),
            };
            match frame.into_data() {
                Ok(data) => self.pieces.push(data),
                // How a server ended.
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    let status = Status::from_header_map(&trailers);
                    if let Some(failure) = status.filter(|status| status.code() != Code::Ok) {
                        break failure;
                    }
                }
            }
        };
        *self = Self::of(Body::empty());
        Poll::Ready(Some(Err(failure)))
    }
}

/// Bytes that lie here and there. What lies in one piece is taken without a copy.
#[derive(Default)]
struct Pieces {
    pieces: VecDeque<Bytes>,
    len: usize,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push_back(piece);
        }
    }
}

impl Buf for Pieces {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| piece)
    }

    fn advance(&mut self, mut count: usize) {
        self.len -= count;
        while count > 0 {
            let Some(first) = self.pieces.front_mut() else { return };
            let step = count.min(first.len());
            first.advance(step);
            count -= step;
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        if let Some(first) = self.pieces.front().filter(|first| first.len() >= len) {
            let taken = first.slice(..len);
            self.advance(len);
            return taken;
        }
        let mut taken = BytesMut::with_capacity(len);
        taken.put(self.take(len));
        taken.freeze()
    }
}

/// A body on its way past tonic.
#[derive(Clone)]
struct Passing(Arc<Mutex<Option<Body>>>);

impl Passing {
    fn insert(into: &mut Extensions, body: Body) {
        into.insert(Self(Arc::new(Mutex::new(Some(body)))));
    }

    fn remove(from: &mut Extensions) -> Option<Body> {
        let passing = from.remove::<Self>()?;
        passing.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The stream that tonic sees in place of one of data.
pub(super) type Nothing<M> = tokio_stream::Empty<M>;

/// A call that sends messages.
pub(super) fn request<M: Laden>(
    messages: impl Stream<Item = M> + Send + Unpin + 'static,
) -> tonic::Request<Nothing<M>> {
    let mut request = tonic::Request::new(tokio_stream::empty());
    let body = Body::new(Outgoing { messages, data: Bytes::new(), trailers: None });
    Passing::insert(request.extensions_mut(), body);
    request
}

/// An answer that sends messages.
pub(super) fn reply<M: Laden>(
    messages: impl Stream<Item = M> + Send + Unpin + 'static,
) -> tonic::Response<Nothing<Result<M, Status>>> {
    let mut response = tonic::Response::new(tokio_stream::empty());
    let trailers = HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static("0"))]);
    let body = Body::new(Outgoing { messages, data: Bytes::new(), trailers: Some(trailers) });
    Passing::insert(response.extensions_mut(), body);
    response
}

/// The messages that a call or an answer brought.
pub(super) fn received<M: Laden>(extensions: &mut Extensions) -> Incoming<M> {
    Incoming::of(Passing::remove(extensions).unwrap_or_default())
}

/// A client's connection or a server whose streams of data go past tonic.
#[derive(Clone)]
pub(super) struct Bulk<S>(pub(super) S);

impl<S: NamedService> NamedService for Bulk<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<Body>> for Bulk<S>
where
    S: Service<http::Request<Body>, Response = http::Response<B>>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<StdError>,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let (asks, answers) = (REQUESTS.contains(&path), REPLIES.contains(&path));
        if let Some(body) = Passing::remove(request.extensions_mut()) {
            *request.body_mut() = body;
        } else if asks {
            let body = std::mem::take(request.body_mut());
            Passing::insert(request.extensions_mut(), body);
        }
        let called = self.0.call(request);
        Box::pin(async move {
            let mut response = called.await?.map(Body::new);
            if let Some(body) = Passing::remove(response.extensions_mut()) {
                *response.body_mut() = body;
            } else if answers {
                let body = std::mem::take(response.body_mut());
                Passing::insert(response.extensions_mut(), body);
            }
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    fn segment(len: usize) -> Segment {
        let data = (0..len).map(|i| i as u8).collect::<Vec<_>>().into();
        Segment { task: "worker:1".to_owned(), tag: len as u64, data, place: None }
    }

    /// The bytes of an outgoing body, by frames.
    fn frames(messages: Vec<Segment>) -> Vec<Bytes> {
        let mut body =
            Outgoing { messages: tokio_stream::iter(messages), data: Bytes::new(), trailers: None };
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut frames = Vec::new();
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut context) {
            frames.push(frame.into_data().unwrap());
        }
        frames
    }

    fn read(frames: Vec<Bytes>) -> Vec<Result<Segment, Status>> {
        let frames = frames.into_iter().map(|data| Ok::<_, Status>(Frame::data(data)));
        let incoming = Incoming::of(Body::new(Frames(tokio_stream::iter(frames))));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(incoming.collect())
    }

    struct Frames<S>(S);

    impl<S: Stream<Item = Result<Frame<Bytes>, Status>> + Unpin> HttpBody for Frames<S> {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Pin::new(&mut self.0).poll_next(context)
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_protocol() {
        for len in [0, 1, 127, 128, 70_000] {
            let bytes = frames(vec![segment(len)]).concat();
            let plain = segment(len).encode_to_vec();
            assert_eq!((bytes[0], &bytes[1..5]), (0, &(plain.len() as u32).to_be_bytes()[..]));
            assert_eq!(bytes[5..], plain);
        }
    }

    #[test]
    fn messages_arrive_however_they_are_cut() {
        let messages: Vec<_> = [0, 5, 3000, 1, 0, 70_000].map(segment).into();
        let bytes = Bytes::from(frames(messages.clone()).concat());
        for size in [1, 4, 7, 1000, 80_000] {
            let cut = bytes.chunks(size).map(|piece| bytes.slice_ref(piece)).collect();
            let arrived: Vec<_> = read(cut).into_iter().map(Result::unwrap).collect();
            assert_eq!(arrived, messages, "in pieces of {size}");
        }
    }

    #[test]
    fn data_is_not_copied() {
        let sent = segment(50_000);
        let frames = frames(vec![sent.clone()]);
        assert_eq!(frames[1].as_ptr(), sent.data.as_ptr());
        let arrived = read(frames).remove(0).unwrap();
        assert_eq!(arrived.data.as_ptr(), sent.data.as_ptr());
    }

    #[test]
    fn bad_streams_are_refused() {
        let bytes = Bytes::from(frames(vec![segment(100)]).concat());
        let code = |bytes: Bytes| {
            let mut read = read(vec![bytes]);
            assert_eq!(read.len(), 1);
            read.remove(0).unwrap_err().code()
        };
        assert_eq!(code(bytes.slice(..60)), Code::DataLoss);
        assert_eq!(code(bytes.slice(..3)), Code::DataLoss);
        assert_eq!(code(Bytes::from_static(&[1, 0, 0, 0, 0])), Code::Unimplemented);
        assert_eq!(code(Bytes::from_static(&[0, 255, 0, 0, 0])), Code::OutOfRange);
        assert_eq!(code(Bytes::from_static(&[0, 0, 0, 0, 1, 7])), Code::InvalidArgument);
    }
}
