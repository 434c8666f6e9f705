//! What the clients of a model ask for: one SLO, several, or none.

use super::*;

impl Checks<'_> {
    /// The nearest SLO first.
    pub(super) fn classes(&self, name: &str, model: &raw::Model) -> Result<Vec<Class>> {
        let key = |key: &str| format!("model {name:?}: {key}");
        let slo = |prefix: &str, slo_ms: Option<f64>, background: bool| match (slo_ms, background) {
            (Some(slo_ms), false) => {
                self.above_zero(&key(&format!("{prefix}slo_ms")), slo_ms, TIME_MAX_MS).map(Span::from_millis_f64)
            }
            (None, true) => Ok(Span::ENDLESS),
            (None, false) => {
                let problem = "expected a number of milliseconds, or background = true, found neither";
                self.fail(key(&format!("{prefix}slo_ms")), problem)
            }
            (Some(_), true) => self.fail(key(&format!("{prefix}background")), "expected no slo_ms beside it"),
        };
        match (model.slo_ms, &model.classes) {
            (slo_ms, None) => Ok(vec![Class { slo: slo("", slo_ms, model.background)?, share: 1.0 }]),
            (None, Some(raw)) if !model.background => {
                if !(1..=CLASSES_MAX).contains(&raw.len()) {
                    return self.fail(key("classes"), format!("expected 1 to {CLASSES_MAX}, found {}", raw.len()));
                }
                let given = raw.iter().filter(|class| class.share.is_some()).count();
                if given > 0 && given < raw.len() {
                    let problem = format!("expected for every class or for none, found for {given} of {}", raw.len());
                    return self.fail(key("classes.share"), problem);
                }
                let mut classes = Vec::new();
                for &raw::Class { slo_ms, background, share } in raw {
                    let slo = slo("classes.", slo_ms, background)?;
                    let share = self.above_zero(&key("classes.share"), share.unwrap_or(1.0), 1e9)?;
                    classes.push(Class { slo, share });
                }
                classes.sort_unstable_by_key(|class| class.slo);
                if let Some(twice) = classes.windows(2).find(|pair| pair[0].slo == pair[1].slo) {
                    let problem = format!("expected different ones, found {} twice", twice[0].slo);
                    return self.fail(key("classes.slo_ms"), problem);
                }
                let sum: f64 = classes.iter().map(|class| class.share).sum();
                classes.iter_mut().for_each(|class| class.share /= sum);
                Ok(classes)
            }
            (_, Some(_)) => self.fail(key("classes"), "expected no slo_ms or background beside them"),
        }
    }
}
