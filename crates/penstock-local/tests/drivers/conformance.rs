//! Runs the conformance suite on Penstock's own brokers, over every transport.

use std::time::Instant;

use crate::support::*;

mod memory {
    penstock_conformance::tests!(crate::support::BrokerPlace::memory);

    /// With a single client, its goodbye stops the broker.
    #[test]
    fn a_goodbye_ends_the_broker_of_one_client() {
        super::a_goodbye_ends_the_broker(&crate::support::BrokerPlace::memory());
    }
}

mod local {
    penstock_conformance::tests!(crate::support::BrokerPlace::local);
}

mod unix {
    penstock_conformance::tests!(crate::support::BrokerPlace::unix);
}

mod tcp {
    penstock_conformance::tests!(crate::support::BrokerPlace::tcp);
}

fn a_goodbye_ends_the_broker(place: &BrokerPlace) {
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let pid = client.broker_pid();
    client.driver.close(Instant::now() + PATIENCE);
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let gone = || rustix::process::test_kill_process(pid).is_err();
    let deadline = Instant::now() + PATIENCE;
    while !gone() {
        assert!(Instant::now() < deadline, "the broker goes on for nobody");
        std::thread::yield_now();
    }
}

/// A driver without a broker must claim the same capabilities that the broker then declares.
#[test]
fn a_broker_declares_what_its_driver_claims() {
    for place in [
        BrokerPlace::memory(),
        BrokerPlace::local(),
        BrokerPlace::unix(),
    ] {
        let client = place.client();
        assert_eq!(*client.probe().unwrap(), *client.driver.upper_bound());
    }
}
