/* kernels/host/dense_pack.c - packed weights: sizes, packing, widening, embedding rows.
 *
 * Responsible for: the one place that knows both the GGUF block formats and our panels.
 * Not responsible for: reading files or checking where a tensor stands (engine/model).
 */
#include "kernels/host/dense.h"

#include <assert.h>

enum { DIMENSION_MAX = 1 << 24 };

static int held(enum ops_type type, uint32_t n, uint32_t k) {
    return dense_unit_bytes(type) != 0 && n > 0 && k > 0 && n <= DIMENSION_MAX &&
           k <= DIMENSION_MAX && k % OPS_K_UNIT == 0;
}

/* A unit of one output as the file holds it: its sixteenth of a panel's unit. */
static uint32_t source_unit_bytes(enum ops_type type) {
    return dense_unit_bytes(type) / OPS_PANEL;
}

uint64_t ops_weight_bytes(enum ops_type type, uint32_t n, uint32_t k) {
    if (!held(type, n, k))
        return 0;
    return (uint64_t)((n + OPS_PANEL - 1) / OPS_PANEL) * (k / OPS_K_UNIT) * dense_unit_bytes(type);
}

uint64_t ops_tensor_bytes(enum ops_type type, uint32_t n, uint32_t k) {
    if (!held(type, n, k))
        return 0;
    return (uint64_t)n * (k / OPS_K_UNIT) * source_unit_bytes(type);
}

/* Moves one unit of one output into its lane of the panel's unit, which was zero. */
static void pack_unit(enum ops_type type, const uint8_t *source, uint32_t lane, uint8_t *unit) {
    uint32_t value_bytes = type == OPS_F32 ? 4 : 2;
    uint32_t scale_bytes = type == OPS_Q4_1 ? 4 : 2;

    if (type == OPS_F32 || type == OPS_F16 || type == OPS_BF16) {
        for (uint32_t k = 0; k < OPS_K_UNIT; k++)
            memcpy(unit + (k * OPS_PANEL + lane) * value_bytes, source + k * value_bytes,
                   value_bytes);
        return;
    }
    for (uint32_t part = 0; part < scale_bytes / 2; part++)
        memcpy(unit + (part * OPS_PANEL + lane) * 2, source + part * 2, 2);
    source += scale_bytes;
    unit += OPS_PANEL * scale_bytes;
    for (uint32_t k = 0; k < OPS_K_UNIT; k++) {
        if (type == OPS_Q8_0) {
            unit[k * OPS_PANEL + lane] = source[k];
            continue;
        }
        /* The file pairs inputs k and k + 16 of one output, a panel pairs lanes i and i + 8. */
        uint8_t code = k < 16 ? source[k] & 15 : source[k - 16] >> 4;
        unit[k * 8 + lane % 8] |= (uint8_t)(lane < 8 ? code : code << 4);
    }
}

void ops_weight_pack(const struct ops_weight *weight, const uint8_t *tensor, uint8_t *packed,
                     uint32_t first_panel, uint32_t end_panel) {
    uint32_t units = weight->k / OPS_K_UNIT;
    uint32_t unit_bytes = dense_unit_bytes(weight->type);
    uint64_t row_bytes = (uint64_t)units * source_unit_bytes(weight->type);

    assert(held(weight->type, weight->n, weight->k));
    assert(end_panel <= dense_panels(weight));
    for (uint32_t panel = first_panel; panel < end_panel; panel++) {
        uint8_t *to = packed + (uint64_t)panel * units * unit_bytes;
        uint32_t lanes = weight->n - panel * OPS_PANEL;
        if (lanes > OPS_PANEL)
            lanes = OPS_PANEL;
        memset(to, 0, (size_t)units * unit_bytes);
        for (uint32_t u = 0; u < units; u++) {
            for (uint32_t lane = 0; lane < lanes; lane++) {
                uint64_t row = (uint64_t)panel * OPS_PANEL + lane;
                pack_unit(weight->type,
                          tensor + row * row_bytes + (uint64_t)u * source_unit_bytes(weight->type),
                          lane, to + (size_t)u * unit_bytes);
            }
        }
    }
}

static void widen_plain(enum ops_type type, const uint8_t *unit, float *wide) {
    for (uint32_t i = 0; i < OPS_K_UNIT * OPS_PANEL; i++) {
        if (type == OPS_F32)
            memcpy(wide + i, unit + i * 4, 4);
        else if (type == OPS_F16)
            wide[i] = dense_f16_f32(dense_get_u16(unit + i * 2));
        else
            wide[i] = dense_bf16_f32(dense_get_u16(unit + i * 2));
    }
}

static void read_scales(enum ops_type type, const uint8_t *unit, float *scale, float *add) {
    for (uint32_t lane = 0; lane < OPS_PANEL; lane++) {
        scale[lane] = dense_f16_f32(dense_get_u16(unit + lane * 2));
        if (type == OPS_Q4_1)
            add[lane] = dense_f16_f32(dense_get_u16(unit + (OPS_PANEL + lane) * 2));
        else
            add[lane] = type == OPS_Q4_0 ? -8.0f * scale[lane] : 0.0f;
    }
}

static void widen_unit(enum ops_type type, const uint8_t *unit, float *wide) {
    float scale[OPS_PANEL], add[OPS_PANEL];

    if (type == OPS_F32 || type == OPS_F16 || type == OPS_BF16) {
        widen_plain(type, unit, wide);
        return;
    }
    read_scales(type, unit, scale, add);
    unit += type == OPS_Q4_1 ? OPS_PANEL * 4 : OPS_PANEL * 2;
    for (uint32_t k = 0; k < OPS_K_UNIT; k++, wide += OPS_PANEL) {
        if (type == OPS_Q8_0) {
            for (uint32_t lane = 0; lane < OPS_PANEL; lane++)
                wide[lane] = (float)(int8_t)unit[k * OPS_PANEL + lane] * scale[lane];
            continue;
        }
        for (uint32_t lane = 0; lane < 8; lane++) {
            uint8_t pair = unit[k * 8 + lane];
            wide[lane] = (float)(pair & 15) * scale[lane] + add[lane];
            wide[lane + 8] = (float)(pair >> 4) * scale[lane + 8] + add[lane + 8];
        }
    }
}

void dense_widen_c(const struct ops_weight *weight, uint32_t panel, float *wide_out) {
    const uint8_t *unit = dense_panel(weight, panel);

    for (uint32_t u = 0; u < weight->k / OPS_K_UNIT; u++) {
        widen_unit(weight->type, unit, wide_out + (size_t)u * OPS_K_UNIT * OPS_PANEL);
        unit += dense_unit_bytes(weight->type);
    }
}

void ops_weight_rows(const struct ops_weight *packed, uint16_t *rows, uint32_t first_panel,
                     uint32_t end_panel, float *scratch) {
    assert(held(packed->type, packed->n, packed->k));
    assert(end_panel <= dense_panels(packed));
    for (uint32_t panel = first_panel; panel < end_panel; panel++) {
        dense_widen_c(packed, panel, scratch);
        for (uint32_t n = panel * OPS_PANEL; n < (panel + 1) * OPS_PANEL && n < packed->n; n++)
            for (uint32_t k = 0; k < packed->k; k++)
                rows[(size_t)n * packed->k + k] =
                    dense_f32_bf16(scratch[(size_t)k * OPS_PANEL + n % OPS_PANEL]);
    }
}

/* One lane of a unit, the same bits as widen_unit. */
static void widen_lane(enum ops_type type, const uint8_t *unit, uint32_t lane, float *out) {
    const uint8_t *codes = unit + (type == OPS_Q4_1 ? OPS_PANEL * 4 : OPS_PANEL * 2);
    float scale = dense_f16_f32(dense_get_u16(unit + lane * 2));
    float add = type == OPS_Q4_1 ? dense_f16_f32(dense_get_u16(unit + (OPS_PANEL + lane) * 2))
                                 : -8.0f * scale;

    for (uint32_t k = 0; k < OPS_K_UNIT; k++) {
        uint32_t i = k * OPS_PANEL + lane;
        if (type == OPS_F32)
            memcpy(out + k, unit + i * 4, 4);
        else if (type == OPS_F16)
            out[k] = dense_f16_f32(dense_get_u16(unit + i * 2));
        else if (type == OPS_BF16)
            out[k] = dense_bf16_f32(dense_get_u16(unit + i * 2));
        else if (type == OPS_Q8_0)
            out[k] = (float)(int8_t)codes[i] * scale;
        else
            out[k] = (float)(codes[k * 8 + lane % 8] >> (lane < 8 ? 0 : 4) & 15) * scale + add;
    }
}

void dense_embed_c(const struct ops_embed *args, uint32_t first_item, uint32_t end_item,
                   void *scratch) {
    const struct ops_weight *table = &args->table;
    uint32_t unit_bytes = dense_unit_bytes(table->type);

    (void)scratch;
    for (uint32_t row = first_item; row < end_item; row++) {
        assert(args->ids[row] < table->n);
        const uint8_t *unit = dense_panel(table, args->ids[row] / OPS_PANEL);
        for (uint32_t u = 0; u < table->k / OPS_K_UNIT; u++)
            widen_lane(table->type, unit + (size_t)u * unit_bytes, args->ids[row] % OPS_PANEL,
                       args->out + row * args->out_stride + (size_t)u * OPS_K_UNIT);
    }
}
