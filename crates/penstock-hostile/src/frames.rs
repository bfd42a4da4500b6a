//! Feeds the native protocol any bytes, in any portions.

use arbitrary::{Result, Unstructured};
use bytes::{BufMut, BytesMut};
use penstock_message::{
    Answer, CancelOrder, Delivery, Key, KeyState, Lease, Notice, Query, Receipt, RefusedWait,
};
use penstock_wire::proto::{ToBroker, ToClient};
use penstock_wire::{Decoder, Heard, MAX_FRAME_BYTES, MAX_HELLO_BYTES, convert, encode_frame};

/// Checks that nothing panics, that a meaningful message keeps its meaning when encoded again, and that an
/// incomplete frame keeps no more bytes than have arrived.
pub fn frames(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let _ended = play(&mut data);
}

fn play(data: &mut Unstructured<'_>) -> Result<()> {
    let limit = match data.ratio(1, 4)? {
        true => MAX_HELLO_BYTES,
        false => MAX_FRAME_BYTES,
    };
    let to_client = data.arbitrary()?;
    let portion = data.int_in_range(1..=300_usize)?;
    // A short input can then become a long frame, mostly of many entries.
    let repeats = match data.ratio(1, 16)? {
        true => data.int_in_range(1..=100_000_usize)?,
        false => 1,
    };
    // A whole MiB now and then: it takes as long as hundreds of short streams.
    let most_bytes: usize = match repeats {
        90_000.. => 1 << 20,
        _ => 32 << 10,
    };
    let true_lengths = data.ratio(7, 8)?;
    let mut stream = BytesMut::new();
    if true_lengths {
        while !data.is_empty() {
            let length = data.int_in_range(0..=data.len().min(2_000))?;
            let frame = data.bytes(length)?;
            let room = most_bytes.saturating_sub(stream.len());
            let repeats = repeats.min(room / length.max(1)).max(1);
            stream.put_u32_le((length * repeats) as u32);
            for _ in 0..repeats {
                stream.extend_from_slice(frame);
            }
        }
    } else {
        stream.extend_from_slice(data.bytes(data.len())?);
    }
    match to_client {
        false => hear(&stream, portion, limit, meaning_to_broker),
        true => hear(&stream, portion, limit, meaning_to_client),
    }
    Ok(())
}

fn hear<T: Heard + PartialEq + Clone + std::fmt::Debug>(
    stream: &[u8],
    portion: usize,
    limit: usize,
    meaning: fn(T) -> Option<T>,
) {
    let mut decoder = Decoder::<T>::new(limit);
    let mut arrived = 0;
    let portion = portion.max(stream.len() / 64);
    for bytes in stream.chunks(portion) {
        decoder.extend(bytes);
        arrived += bytes.len();
        loop {
            assert!(decoder.pending_bytes() <= arrived);
            match decoder.next_message() {
                Ok(Some(message)) => check_meaning(message, meaning),
                Ok(None) => break,
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    return;
                }
            }
        }
    }
}

/// Checks that a message reads the same after it is sent again.
fn check_meaning<T: Heard + PartialEq + Clone + std::fmt::Debug>(
    message: T,
    meaning: fn(T) -> Option<T>,
) {
    let Some(said) = meaning(message) else {
        return;
    };
    let mut bytes = BytesMut::new();
    encode_frame(&said, &mut bytes);
    // A message with defaults left out may be longer in full.
    let mut decoder = Decoder::<T>::new(usize::MAX);
    decoder.extend(&bytes);
    let heard = decoder.next_message().expect("what we say is the protocol");
    let heard = heard.expect("it was said whole");
    assert!(heard == said, "said {said:?}, heard {heard:?}");
    let again = meaning(heard.clone()).expect("it had a meaning");
    assert!(again == heard, "once {heard:?}, then {again:?}");
}

/// Converts to the nouns and back; `None` if any part is meaningless.
fn through<N, W>(wire: Vec<W>) -> Option<Vec<W>>
where
    N: TryFrom<W, Error = penstock_wire::WireError>,
    W: From<N>,
{
    let nouns: Vec<N> = convert::all(wire).ok()?;
    Some(nouns.into_iter().map(W::from).collect())
}

fn meaning_to_broker(mut frame: ToBroker) -> Option<ToBroker> {
    for commit in &mut frame.commits {
        convert::durability(commit.durability).ok()?;
        let txs = convert::decode_txs(std::mem::take(&mut commit.txs)).ok()?;
        commit.txs = txs.into_iter().map(convert::encode_tx).collect();
    }
    if let Some(hello) = &mut frame.hello {
        convert::session_id(&hello.session).ok()?;
        hello.leases = through::<Lease, _>(std::mem::take(&mut hello.leases))?;
    }
    if let Some(watch) = &mut frame.watch {
        watch.keys = through::<Key, _>(std::mem::take(&mut watch.keys))?;
        watch.unwatch = through::<Key, _>(std::mem::take(&mut watch.unwatch))?;
        watch.wait_over = through::<Key, _>(std::mem::take(&mut watch.wait_over))?;
    }
    frame.queries = through::<(u64, Query), _>(std::mem::take(&mut frame.queries))?;
    Some(frame)
}

fn meaning_to_client(mut frame: ToClient) -> Option<ToClient> {
    if let Some(confirm) = &mut frame.confirm {
        let receipts = std::mem::take(&mut confirm.receipts);
        confirm.receipts = through::<(u64, Receipt), _>(receipts)?;
    }
    if let Some(welcome) = &mut frame.welcome {
        welcome.leases = through::<Lease, _>(std::mem::take(&mut welcome.leases))?;
    }
    frame.deliveries = through::<Delivery, _>(std::mem::take(&mut frame.deliveries))?;
    frame.cancels = through::<CancelOrder, _>(std::mem::take(&mut frame.cancels))?;
    frame.values = through::<(Key, KeyState), _>(std::mem::take(&mut frame.values))?;
    frame.refused_waits = through::<RefusedWait, _>(std::mem::take(&mut frame.refused_waits))?;
    frame.answers = through::<(u64, Answer), _>(std::mem::take(&mut frame.answers))?;
    frame.notices = through::<Notice, _>(std::mem::take(&mut frame.notices))?;
    Some(frame)
}
