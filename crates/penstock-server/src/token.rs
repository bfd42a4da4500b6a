//! Secret that clients on TCP present. It is compared, and never shown.

use std::fmt;

use penstock_wire::MAX_TOKEN_BYTES;
use subtle::ConstantTimeEq;

/// Token that a client must present unless its socket is trusted.
#[derive(Clone)]
pub struct Token {
    /// Bytes padded with zeros, so that comparing takes equally long for every token and every guess.
    padded: [u8; MAX_TOKEN_BYTES],
    length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is empty")]
    Empty,
    #[error("the token has {bytes} bytes; the limit is {MAX_TOKEN_BYTES}")]
    TooLong { bytes: usize },
}

impl Token {
    pub fn new(secret: &[u8]) -> Result<Self, TokenError> {
        if secret.is_empty() {
            return Err(TokenError::Empty);
        }
        Self::pad(secret).ok_or(TokenError::TooLong {
            bytes: secret.len(),
        })
    }

    fn pad(secret: &[u8]) -> Option<Self> {
        let mut padded = [0; MAX_TOKEN_BYTES];
        padded.get_mut(..secret.len())?.copy_from_slice(secret);
        Some(Self {
            padded,
            length: secret.len() as u64,
        })
    }

    /// Compares in constant time: the time of a refusal must reveal neither how much of a guess was right nor how long
    /// the token is.
    pub(crate) fn is(&self, shown: &[u8]) -> bool {
        let Some(shown) = Self::pad(shown) else {
            return false;
        };
        let same = self.padded.ct_eq(&shown.padded) & self.length.ct_eq(&shown.length);
        same.into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Token(not shown)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_itself_and_nothing_near_it() {
        let check = |token: &[u8], shown: &[u8]| {
            let is = Token::new(token).expect("a token").is(shown);
            assert_eq!(is, token == shown, "{token:?} {shown:?}");
        };
        let token = b"a secret of 22 bytes..";
        check(token, token);
        for length in 0..token.len() {
            check(token, &token[..length]);
            check(token, &token[length..]);
            let mut changed = *token;
            changed[length] ^= 1;
            check(token, &changed);
            check(&changed, token);
        }
        // The padding is not part of the token.
        check(token, b"a secret of 22 bytes..\0");
        check(b"zero\0", b"zero");
        check(b"\0", b"");
        check(&[7; MAX_TOKEN_BYTES], &[7; MAX_TOKEN_BYTES]);
        check(&[7; MAX_TOKEN_BYTES], &[7; MAX_TOKEN_BYTES + 1]);
        check(token, &[0; 64 << 10]);
    }

    #[test]
    fn every_guess_takes_as_long_as_every_other() {
        use std::hint::black_box;
        use std::time::{Duration, Instant};

        let secret = [b'a'; 64];
        let token = Token::new(&secret).expect("a token");
        // Has the token's length: the length of a guess is no secret to the guesser.
        let mut guesses = vec![secret.to_vec()];
        for wrong_at in [0, 31, 63] {
            let mut guess = secret.to_vec();
            guess[wrong_at] = b'b';
            guesses.push(guess);
        }
        // The minimum of many times excludes the machine's other work, so a busy machine only takes longer to reach it.
        let mut least = vec![Duration::MAX; guesses.len()];
        let mut spread = f64::MAX;
        for _ in 0..200_000 {
            for (guess, least) in guesses.iter().zip(&mut least) {
                let start = Instant::now();
                for _ in 0..50 {
                    black_box(token.is(black_box(guess)));
                }
                *least = start.elapsed().min(*least);
            }
            let longest = least.iter().max().expect("some").as_secs_f64();
            let shortest = least.iter().min().expect("some").as_secs_f64();
            spread = longest / shortest - 1.0;
            if spread < 0.05 {
                return;
            }
        }
        panic!("the times differ by {:.0} %: {least:?}", spread * 100.0);
    }

    #[test]
    fn a_token_that_no_client_could_show_is_refused() {
        assert_eq!(Token::new(b"").unwrap_err(), TokenError::Empty);
        let long = Token::new(&[1; MAX_TOKEN_BYTES + 1]).unwrap_err();
        assert_eq!(
            long.to_string(),
            "the token has 257 bytes; the limit is 256"
        );
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::new(b"hunter2").unwrap();
        assert_eq!(format!("{token:?}"), "Token(not shown)");
    }
}
