//! Pictures, which are submitted before they are decoded.

use ::png::ColorType;
use repository::{Color, ImagePipeline, Layout};

use super::*;
use crate::picture::png_of;

const PIXELS: [u8; 12] = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120];

/// Two by two pixels, as they are.
fn of_pictures() -> repository::Model {
    let mut model =
        model("double", vec![tensor("x", DataType::Uint8, &[2, 2, 3])], vec![tensor("y", DataType::Uint8, &[2, 2, 3])]);
    model.image = Some(ImagePipeline {
        input: 0,
        color: Color::Rgb,
        height: 2,
        width: 2,
        crop: 0.0,
        invert: false,
        layout: Layout::Hwc,
        scale: 1.0,
        mean: vec![0.0; 3],
        std: vec![1.0; 3],
    });
    model
}

fn png() -> Vec<u8> {
    png_of(2, 2, ColorType::Rgb, &PIXELS)
}

fn with_pictures<F: Future<Output = ()>>(test: impl FnOnce(TcpStream, Rc<Peer>) -> F) {
    with_model(of_pictures(), open_gate(limits()), None, |address, peer| async move {
        test(TcpStream::connect(address).await.unwrap(), peer).await;
    });
}

async fn send(stream: &mut TcpStream, picture: &[u8]) -> Heard {
    ask(stream, &post_of("/v2/models/double/infer", "content-type: image/png\r\n", picture)).await
}

fn assert_doubled(heard: &Heard) {
    assert_eq!(heard.status, 200, "{heard:?}");
    assert_eq!(heard.json()["outputs"][0]["data"], json!(PIXELS.map(|pixel| pixel.wrapping_mul(2))));
}

#[test]
fn a_picture_is_submitted_before_it_is_decoded_and_answered_as_any_other() {
    with_pictures(|mut stream, peer| async move {
        for count in 1..4 {
            assert_doubled(&send(&mut stream, &png()).await);
            assert_eq!(peer.submitted.get(), (count, count));
        }
        assert_eq!((peer.cancelled.get(), peer.desk.with_core(Core::outstanding)), (0, 0));
    });
}

#[test]
fn a_picture_that_cannot_be_decoded_ends_with_the_reason_and_its_task_is_cancelled() {
    with_pictures(|mut stream, peer| async move {
        let heard = send(&mut stream, b"GIF89a").await;
        let text = "the picture cannot be used: it is neither JPEG nor PNG";
        assert_eq!((heard.status, &heard.json()["error"]), (400, &json!(text)));
        // The next one is decoded first, and says the same.
        assert_eq!(send(&mut stream, b"GIF89a").await.json()["error"], json!(text));
        assert_eq!((peer.submitted.get(), peer.cancelled.get()), ((1, 1), 1));
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_picture_that_is_late_is_submitted_again_and_the_next_is_decoded_first() {
    with_pictures(|mut stream, peer| async move {
        peer.fates.borrow_mut().push_back(Fate::Drop(DropReason::InputLate));
        assert_doubled(&send(&mut stream, &png()).await);
        assert_eq!(peer.submitted.get(), (2, 1), "the second time it was there");
        assert_doubled(&send(&mut stream, &png()).await);
        assert_eq!(peer.submitted.get(), (3, 1));
        assert_doubled(&send(&mut stream, &png()).await);
        assert_eq!(peer.submitted.get(), (4, 2));
        let metrics = ask(&mut stream, &get_of("/metrics")).await;
        let metrics = String::from_utf8(metrics.body).unwrap();
        assert!(metrics.contains("downbeat_late_inputs_total 1\n"), "{metrics}");
    });
}

#[test]
fn a_picture_that_is_late_twice_or_dropped_meanwhile_missed_its_deadline() {
    with_pictures(|mut stream, peer| async move {
        peer.fates.borrow_mut().extend([Fate::Drop(DropReason::InputLate); 2]);
        let heard = send(&mut stream, &png()).await;
        let text = "dropped: its input was not decoded in time";
        assert_eq!((heard.status, &heard.json()["error"]), (504, &json!(text)));
        send(&mut stream, &png()).await;
        peer.fates.borrow_mut().push_back(Fate::Drop(DropReason::Deadline));
        let heard = send(&mut stream, &png()).await;
        let text = "dropped: Request timeout expired: its deadline could no longer be met";
        assert_eq!((heard.status, &heard.json()["error"]), (504, &json!(text)));
        assert_eq!((peer.submitted.get(), peer.cancelled.get()), ((4, 2), 0));
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}
